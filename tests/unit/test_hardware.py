"""Presets, validation and loading of hardware profiles."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from elixir.errors import ArtifactError, InputError, InputTypeError
from elixir.hardware import HardwareProfile, load_hardware, preset, preset_names

GIB = 2**30
EXPECTED = "h200 h100 h100-pcie a100 a100-40gb v100 rtx4090 rtx3090 l40s l4 t4 a10g b200 rtx5090 cpu".split()


def holds_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return any(holds_numbers(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return any(holds_numbers(item) for item in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def unsourced(profile: HardwareProfile) -> list[str]:
    """Fields with a number and no source."""
    names = [field.name for field in dataclasses.fields(profile)]
    return [n for n in names if holds_numbers(getattr(profile, n)) and not profile.sources.get(n, "").strip()]


def test_every_promised_preset_is_there() -> None:
    assert sorted(preset_names()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    profile = preset(name)
    assert unsourced(profile) == []
    fields = {field.name for field in dataclasses.fields(profile)}
    assert set(profile.sources) <= fields
    assert profile.name == name
    assert profile.measured_at is None


def test_the_check_for_sources_finds_a_missing_one() -> None:
    profile = preset("h200")
    for name in ("device_memory_bytes", "flops_per_s", "compute_capability", "devices_per_host"):
        sources = {key: text for key, text in profile.sources.items() if key != name}
        assert unsourced(dataclasses.replace(profile, sources=sources)) == [name]


@pytest.mark.parametrize("name", EXPECTED)
def test_presets_survive_json(name: str, tmp_path: Path) -> None:
    profile = preset(name)
    path = profile.save(tmp_path / "hw.json")
    assert load_hardware(str(path)) == profile
    assert load_hardware(str(path)).fingerprint == profile.fingerprint


@pytest.mark.parametrize("name", EXPECTED)
def test_presets_are_physically_sensible(name: str) -> None:
    profile = preset(name)
    assert profile.host_to_device_bytes_per_s <= profile.device_memory_bytes_per_s
    if profile.device_kind == "cpu":
        return
    # A link from the host cannot outrun host memory, nor one between devices the devices' memory.
    assert profile.host_to_device_bytes_per_s <= profile.host_memory_bytes_per_s
    assert profile.device_to_device_bytes_per_s <= profile.device_memory_bytes_per_s
    # Adam moves 28 bytes an element: no device or host updates faster than its memory allows.
    assert profile.device_adam_numel_per_s * 28 <= profile.device_memory_bytes_per_s
    assert profile.host_adam_numel_per_s * 28 <= profile.host_memory_bytes_per_s * 1.25
    # Dense peaks: quoting the sparse figure by mistake would give a ratio of half to single precision above 20.
    assert 1 < profile.flops_per_s["float16"] / profile.flops_per_s["float32"] <= 30


@pytest.mark.parametrize(("name", "gib"), [("h200", 139.8), ("h100", 79.1), ("a100", 79.15), ("v100", 31.7)])
def test_memory_is_what_pytorch_reports(name: str, gib: float) -> None:
    assert preset(name).device_memory_bytes / GIB == pytest.approx(gib, abs=0.06)


def test_a100_links_are_those_of_the_original() -> None:
    profile = preset("a100")
    assert profile.host_to_device_bytes_per_s == 25.0e9  # 16.3 n + 8.7 GB/s for n = 1
    assert profile.device_to_host_bytes_per_s == 18.1e9  # 15.8 n + 2.3 GB/s
    assert profile.host_adam_numel_per_s == 5.15e9
    assert profile.device_adam_numel_per_s == pytest.approx(50e9)


def test_presets_do_not_share_state() -> None:
    preset("h200").flops_per_s["bfloat16"] = 1.0
    preset("h200").sources["flops_per_s"] = "nonsense"
    assert preset("h200").flops_per_s["bfloat16"] == 989e12
    assert "nonsense" not in preset("h200").sources["flops_per_s"]


def test_names_ignore_case() -> None:
    assert preset("H200") == preset("h200")


def test_unknown_hardware_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown hardware 'h20'; did you mean .*h200"):
        load_hardware("h20")
    with pytest.raises(InputTypeError, match="named by text"):
        load_hardware(200)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_memory_bytes", 0),
        ("device_memory_bytes", -1),
        ("device_memory_bytes", True),
        ("device_memory_bytes_per_s", math.inf),
        ("host_to_device_bytes_per_s", math.nan),
        ("device_to_host_bytes_per_s", "fast"),
        ("host_memory_bytes", 0),
        ("devices_per_host", 0),
        ("host_adam_numel_per_s", -5.0),
        ("matmul_efficiency", 0.0),
        ("matmul_efficiency", 1.01),
        ("device_kind", "tpu"),
        ("name", ""),
        ("flops_per_s", {}),
        ("flops_per_s", {"bf16": 1e12}),
        ("flops_per_s", {"half": 1e12}),
        ("flops_per_s", {"bfloat16": 0.0}),
        ("compute_capability", None),
        ("compute_capability", (0, 0)),
        ("measured_at", "yesterday"),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(preset("h200"), **{field: value})


def test_a_cpu_has_no_compute_capability() -> None:
    with pytest.raises(InputError, match="compute_capability"):
        dataclasses.replace(preset("cpu"), compute_capability=(9, 0))


def test_a_bad_number_in_a_file_is_an_artifact_error(tmp_path: Path) -> None:
    path = tmp_path / "hw.json"
    path.write_text(preset("h200").to_json().replace('"matmul_efficiency": 0.', '"matmul_efficiency": 7.'))
    with pytest.raises(ArtifactError, match="matmul_efficiency"):
        load_hardware(str(path))
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_hardware(str(tmp_path / "none.json"))


def test_flops_rate_is_peak_times_efficiency() -> None:
    profile = preset("h200")
    assert profile.flops_rate("bfloat16") == pytest.approx(790.3e12)
    with pytest.raises(InputError, match=r"'h200' has no FLOP/s for dtype 'float64'; it has bfloat16, float16"):
        profile.flops_rate("float64")


@pytest.mark.parametrize(("name", "reached"), [("v100", 10.65e12), ("t4", 2.46e12)])
def test_devices_without_bf16_units_give_the_measured_rate(name: str, reached: float) -> None:
    assert preset(name).flops_rate("bfloat16") == pytest.approx(reached)


def test_fingerprint_is_of_the_numbers_only() -> None:
    profile = preset("h200")
    assert dataclasses.replace(profile, sources={}).fingerprint == profile.fingerprint
    assert dataclasses.replace(profile, device_memory_bytes=1).fingerprint != profile.fingerprint
