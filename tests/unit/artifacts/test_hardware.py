"""Presets, validation and loading of hardware profiles."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

import elixir
from elixir.errors import ArtifactError, InputError, InputTypeError
from elixir.hardware.memory import cpu_name
from elixir.hardware.profile import (
    HardwareProfile,
    load_hardware,
    preset,
    warn_if_other_device,
)
from elixir.hardware.rate_fit import RateFit, fit_unit

EXPECTED = (
    "h200 h100 h100-pcie a100 a100-40gb a6000 v100 rtx4090 rtx3090 l40s l4 t4 a10g b200 rtx5090 gh200 gb10 rtxpro6000 "
    "mi300x cpu"
).split()


def holds_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return any(holds_numbers(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return any(holds_numbers(item) for item in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def unsourced(profile: HardwareProfile) -> list[str]:
    """Fields with a number and no source."""
    names = [field.name for field in dataclasses.fields(profile) if holds_numbers(getattr(profile, field.name))]
    names += [f"fits.{key}" for key in profile.fits]
    return [name for name in names if not profile.sources.get(name, "").strip()]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    profile = preset(name)
    assert unsourced(profile) == []
    fields = {field.name for field in dataclasses.fields(profile)}
    assert set(profile.sources) <= fields | {f"fits.{key}" for key in profile.fits}
    assert profile.name == name
    assert profile.measured_at is None


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


def test_names_ignore_case() -> None:
    assert preset("H200") == preset("h200")


def test_a_preset_is_a_file_that_a_user_can_copy_and_change(tmp_path: Path) -> None:
    folder = Path(elixir.__file__).parent / "hardware" / "presets"
    assert sorted(path.stem for path in folder.iterdir()) == sorted(EXPECTED)
    copied = tmp_path / "mine.json"
    copied.write_text((folder / "gh200.json").read_text().replace('"devices_per_host": 1', '"devices_per_host": 4'))
    assert HardwareProfile.load(copied) == dataclasses.replace(preset("gh200"), devices_per_host=4)


def test_unknown_hardware_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown hardware 'h20'; did you mean .*h200"):
        load_hardware("h20")
    with pytest.raises(InputTypeError, match="must be a name"):
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
        ("host_adam_least", 0.0),
        ("link_least", 1.5),
        ("early_kept", -0.1),
        ("sustained_flops_share", 1.01),
        ("sustained_attention_share", 1.01),
        ("step_range", (1.2, 0.9)),
        ("fits.host_to_device", {"host_to_device": 5e10}),
        ("network_bytes_per_s", 0.0),
        ("network_latency_s", -1e-6),
        ("network_latency_s", math.nan),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(preset("h200"), **{field.partition(".")[0]: value})


# ---------------------------------------------------------------------------------------------------------------- fits


def with_fits(**fits: RateFit) -> HardwareProfile:
    """The h200 preset with fits; ``__`` stands for a point in a key."""
    return dataclasses.replace(preset("h200"), fits={key.replace("__", "."): fit for key, fit in fits.items()})


def test_a_fit_is_latency_and_rate() -> None:
    fit = RateFit(latency_s=0.5, per_s=4.0, error=0.0)
    assert [fit.seconds(amount) for amount in (0, 2, 4.0)] == [0.5, 1.0, 1.5]
    for amount in (-1, math.nan, math.inf):
        with pytest.raises(InputError, match="amount of work"):
            fit.seconds(amount)


def test_plain_rates_of_compute_and_collectives() -> None:
    profile = preset("h200")
    for key in ("matmul.bfloat16.tall", "attention.bfloat16"):
        assert profile.seconds(key, 1e12) == pytest.approx(1e12 / 790.3e12)
    # Three quarters of the buffer are other ranks'.
    for key in ("all_gather.4", "reduce_scatter.4"):
        assert profile.seconds(key, 1e9) == pytest.approx(0.75e9 / profile.device_to_device_bytes_per_s)
    assert profile.seconds("all_gather.1", 1e9) == pytest.approx(2e9 / profile.device_memory_bytes_per_s)
    with pytest.raises(InputError, match="float64"):
        profile.seconds("matmul.float64.square", 1)


PLAIN = {
    "host_to_device.both.all_ranks": "host_to_device_bytes_per_s",
    "device_to_host.pageable": "device_to_host_bytes_per_s",
    "host_memory": "host_memory_bytes_per_s",
    "host_adam.8.bfloat16.all_ranks": "host_adam_numel_per_s",
    "device_adam.bfloat16": "device_adam_numel_per_s",
    "reduction.float32": "device_memory_bytes_per_s",
    "device_to_device": "device_to_device_bytes_per_s",
    "disk_read.both": "disk_read_bytes_per_s",
}


def test_the_nearest_measured_key_answers_and_otherwise_the_plain_field() -> None:
    plain = dataclasses.replace(preset("h200"), disk_read_bytes_per_s=3e9)
    for key, field in PLAIN.items():
        assert plain.rate(key) == RateFit(0.0, getattr(plain, field), 0.0)
        assert fit_unit(key) in field
    alone, both, square = RateFit(1.0, 1.0, 0.0), RateFit(2.0, 1.0, 0.0), RateFit(3.0, 1.0, 0.0)
    profile = with_fits(
        host_to_device=alone, host_to_device__both=both, matmul__bfloat16__square=square, elementwise__bfloat16=both
    )
    answers = {
        "host_to_device": alone, "host_to_device.pageable": alone, "host_to_device.both.all_ranks": both,
        "matmul.bfloat16.skinny": square, "activation.bfloat16": both,
    }  # fmt: skip
    assert {key: profile.rate(key) for key in answers} == answers
    assert profile.rate("matmul.float16.skinny") == RateFit(0.0, profile.flops_rate("float16"), 0.0)
    assert (plain.knows_disk, with_fits(disk_read=alone, disk_write=both).knows_disk) == (False, True)
    assert fit_unit("attention.float32") == "flops"


def test_a_fingerprint_is_of_the_numbers_on_which_plans_depend(tmp_path: Path) -> None:
    profile = with_fits(host_to_device=RateFit(1e-5, 5e10, 0.1, ((1e6, 3e-5), (1e9, 2e-2))))
    assert load_hardware(str(profile.save(tmp_path / "hw.json"))) == profile
    same = ({"sources": {}}, {"measured_at": "2026-01-31"}, {"fits": {"host_to_device": RateFit(1e-5, 5e10, 0.3)}})
    for change in same:
        assert dataclasses.replace(profile, **change).fingerprint == profile.fingerprint  # type: ignore[arg-type]
    others = (
        {"device_memory_bytes": 1}, {"network_latency_s": 1.5}, {"fits": {}}, {"early_kept": 0.5}, {"contention": 1.0},
        {"fits": {"host_to_device": RateFit(2e-5, 5e10, 0.1)}}, {"fits": {"host_to_device": RateFit(1e-5, 4e10, 0.1)}},
    )  # fmt: skip
    prints = {dataclasses.replace(profile, **change).fingerprint for change in others}  # type: ignore[arg-type]
    assert len(prints - {profile.fingerprint}) == len(others)


def test_the_ranks_of_a_machine() -> None:
    assert [preset("h200").ranks_per_host(world) for world in (1, 8, 24)] == [1, 8, 8]
    alone = preset("cpu")
    assert alone.ranks_per_host(24) == 24
    assert dataclasses.replace(alone, network_bytes_per_s=1e9, devices_per_host=2).ranks_per_host(24) == 2
    assert alone.flops_rate("float64") in (alone.flops_rate("float32") / 2, alone.flops_per_s.get("float64"))


@pytest.mark.parametrize(
    "key", ["", "pcie", "host_to_device.fast", "matmul", "all_gather", "all_gather.0", "host_adam.x", 3]
)
def test_an_unknown_key_is_refused(key: Any) -> None:
    with pytest.raises(InputError, match="is no key of hardware fits"):
        preset("h200").seconds(key, 1)
    with pytest.raises(InputError, match="is no key of hardware fits"):
        dataclasses.replace(preset("h200"), fits={key: RateFit(0.0, 1.0, 0.0)})


@pytest.mark.parametrize(
    ("field", "text"), [("per_s", "0"), ("per_s", "-5"), ("per_s", "NaN"), ("latency_s", "-1"), ("latency_s", '"fast"')]
)
def test_an_absurd_fit_in_a_file_is_named_with_its_key(field: str, text: str, tmp_path: Path) -> None:
    profile = with_fits(host_to_device__both=RateFit(1.0, 2.0, 0.1))
    data = profile.to_dict()
    data["fits"]["host_to_device.both"][field] = "@"
    path = tmp_path / "hw.json"
    path.write_text(json.dumps(data).replace('"@"', text))
    with pytest.raises(ArtifactError, match=rf"fits\.host_to_device\.both.*{field}"):
        load_hardware(str(path))


# ------------------------------------------------------------------------------------------------------- other machines


def measured_here(name: str) -> HardwareProfile:
    return dataclasses.replace(preset("cpu"), device_name=name, measured_at="2026-01-31")


def test_another_machines_measurement_is_warned_of_with_both_names(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_other_device(measured_here("Acme 9000, 64 cores, 64 threads"))
    (record,) = caplog.records
    assert "Acme 9000" in record.getMessage()
    assert cpu_name() in record.getMessage()
