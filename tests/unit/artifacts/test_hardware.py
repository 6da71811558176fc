"""Presets, validation and loading of hardware profiles."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir
from elixir.errors import ArtifactError, InputError, InputTypeError
from elixir.hardware.memory import cpu_name, device_name_here
from elixir.hardware.profile import (
    HardwareProfile,
    load_hardware,
    preset,
    preset_names,
    warn_if_doubtful,
    warn_if_other_device,
)
from elixir.hardware.rate_fit import LARGEST_ALONE, RateFit, fit_unit
from elixir.search import minimum_waste_search, optimal_search

GIB = 2**30
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


def test_every_promised_preset_is_there() -> None:
    assert sorted(preset_names()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    profile = preset(name)
    assert unsourced(profile) == []
    fields = {field.name for field in dataclasses.fields(profile)}
    assert set(profile.sources) <= fields | {f"fits.{key}" for key in profile.fits}
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


def test_a_preset_is_a_file_that_a_user_can_copy_and_change(tmp_path: Path) -> None:
    folder = Path(elixir.__file__).parent / "hardware" / "presets"
    assert sorted(path.stem for path in folder.iterdir()) == sorted(EXPECTED)
    copied = tmp_path / "mine.json"
    copied.write_text((folder / "gh200.json").read_text().replace('"devices_per_host": 1', '"devices_per_host": 4'))
    assert HardwareProfile.load(copied) == dataclasses.replace(preset("gh200"), devices_per_host=4)


def test_a_unified_memory_counts_once_and_says_that_offload_gains_nothing() -> None:
    profile = preset("gb10")
    assert profile.host_memory_bytes is not None
    assert profile.device_memory_bytes + profile.host_memory_bytes == 128501256192
    assert "offload gains nothing" in profile.sources["host_memory_bytes"]
    assert "Offload gains nothing" in profile.sources["host_to_device_bytes_per_s"]


def test_what_nobody_has_verified_says_so() -> None:
    from_data_sheet = ("device_memory_bytes", "device_memory_bytes_per_s", "flops_per_s", "host_to_device_bytes_per_s")
    assert all("unverified" in preset("mi300x").sources[name] for name in (*from_data_sheet, "matmul_efficiency"))


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


def test_a_disk_whose_speed_is_unknown_is_named_with_the_ways_out() -> None:
    with pytest.raises(InputError, match=r"does not say how fast its disk is; .*--disk-folder"):
        preset("h200").rate("disk_read")


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("latency_s", -1e-9),
        ("latency_s", math.nan),
        ("latency_s", None),
        ("per_s", 0.0),
        ("per_s", -1.0),
        ("per_s", math.inf),
        ("per_s", True),
        ("error", -0.1),
        ("error", math.nan),
        ("points", ((1.0, 0.0),)),
        ("points", ((1.0, 1.0), (math.nan, 1.0))),
        ("points", ((1.0,),)),
    ],
)
def test_an_absurd_fit_is_refused_by_name(field: str, value: Any) -> None:
    good: dict[str, Any] = {"latency_s": 0.0, "per_s": 1.0, "error": 0.0, "points": ()}
    RateFit(**good)
    with pytest.raises(InputError, match=field):
        RateFit(**good | {field: value})


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("host_to_device", "host_to_device_bytes_per_s"),
        ("host_to_device.both.all_ranks", "host_to_device_bytes_per_s"),
        ("device_to_host.pageable", "device_to_host_bytes_per_s"),
        ("host_memory", "host_memory_bytes_per_s"),
        ("host_adam.8.bfloat16.all_ranks", "host_adam_numel_per_s"),
        ("device_adam", "device_adam_numel_per_s"),
        ("reduction.float32", "device_memory_bytes_per_s"),
        ("device_to_device", "device_to_device_bytes_per_s"),
    ],
)
def test_what_was_not_measured_is_answered_by_the_plain_field(key: str, field: str) -> None:
    profile = preset("h200")
    assert profile.seconds(key, 1e9) == pytest.approx(1e9 / getattr(profile, field))
    assert profile.seconds(key, 0) == 0.0


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


def test_the_nearest_measured_key_answers() -> None:
    alone, both, square = RateFit(1.0, 1.0, 0.0), RateFit(2.0, 1.0, 0.0), RateFit(3.0, 1.0, 0.0)
    profile = with_fits(host_to_device=alone, host_to_device__both=both, matmul__bfloat16__square=square)
    assert profile.rate("host_to_device") is alone
    assert profile.rate("host_to_device.pageable") is alone
    assert profile.rate("host_to_device.both.all_ranks") is both
    assert profile.rate("matmul.bfloat16.skinny") is square
    assert profile.rate("matmul.float16.skinny").latency_s == 0.0
    assert profile.rate("device_to_host").per_s == profile.device_to_host_bytes_per_s
    with_elementwise = with_fits(elementwise__bfloat16=both, host_adam__2=alone)
    assert with_elementwise.rate("activation.bfloat16") is both
    assert with_elementwise.rate("host_adam.2.bfloat16.all_ranks") is alone
    assert with_elementwise.rate("host_adam.4").per_s == profile.host_adam_numel_per_s


@pytest.mark.parametrize(
    "key", ["", "pcie", "host_to_device.fast", "matmul", "all_gather", "all_gather.0", "host_adam.x", 3]
)
def test_an_unknown_key_is_refused(key: Any) -> None:
    with pytest.raises(InputError, match="is no key of hardware fits"):
        preset("h200").seconds(key, 1)
    with pytest.raises(InputError, match="is no key of hardware fits"):
        dataclasses.replace(preset("h200"), fits={key: RateFit(0.0, 1.0, 0.0)})


def test_units_of_keys() -> None:
    keys = (
        "host_adam.2",
        "device_adam.bfloat16",
        "matmul.float32.deep",
        "attention.float32",
        "all_gather.2",
        "host_memory",
    )
    assert [fit_unit(key) for key in keys] == ["numel", "numel", "flops", "flops", "bytes", "bytes"]


def test_fits_survive_json_and_show_in_the_fingerprint(tmp_path: Path) -> None:
    profile = with_fits(host_to_device=RateFit(1e-5, 5e10, 0.1, ((1e6, 3e-5), (1e9, 2e-2))))
    assert load_hardware(str(profile.save(tmp_path / "hw.json"))) == profile
    assert profile.fingerprint != preset("h200").fingerprint
    slower = with_fits(host_to_device=RateFit(2e-5, 5e10, 0.1))
    assert slower.fingerprint != profile.fingerprint
    # How well a line fits, and through which points, does not change what a plan is made of.
    assert with_fits(host_to_device=RateFit(1e-5, 5e10, 0.3)).fingerprint == profile.fingerprint


def test_a_network_shows_in_the_fingerprint_where_it_is_known() -> None:
    unknown = dataclasses.replace(preset("h200"), network_bytes_per_s=None)
    known = {dataclasses.replace(unknown, network_bytes_per_s=rate).fingerprint for rate in (None, 4e11, 5e10)}
    assert len(known) == 3
    assert dataclasses.replace(unknown, network_latency_s=0.0).fingerprint not in known


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


def test_this_machines_measurement_and_presets_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        # A process chooses its thread count; the device is the same.
        warn_if_other_device(measured_here(f"{cpu_name()}, 64 threads"))
        warn_if_other_device(preset("h200"))
    assert caplog.records == []


def doubtful_profile() -> HardwareProfile:
    """Two rates that one should not rely on, and several that are as good as they get."""
    fits = {
        "attention.float32": RateFit(0.0, 1e11, 0.3),
        "matmul.float32.square": RateFit(0.0, 1e11, 0.42),
    }
    sources = preset("cpu").sources | {"host_memory_bytes_per_s": f"measured; no fit (too noisy), so {LARGEST_ALONE}"}
    return dataclasses.replace(preset("cpu"), name="noisy", fits=fits, sources=sources)


def test_rates_that_no_fit_describes_are_warned_of_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_doubtful(doubtful_profile())
    (record,) = caplog.records
    text = record.getMessage()
    assert "'noisy'" in text
    assert "host_memory_bytes_per_s: no fit describes what was measured" in text
    assert "fits.matmul.float32.square: its fit is off by up to 42%" in text
    assert "attention" not in text
    assert "elixir hardware --measure" in text


def test_rates_that_were_given_another_source_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    profile = doubtful_profile()
    known = dataclasses.replace(
        profile,
        sources=profile.sources | {"host_memory_bytes_per_s": "data sheet"},
        fits={"all_gather.2": RateFit(0, 1e9, 0.35)},
    )
    with caplog.at_level(logging.WARNING):
        for given in (known, *map(preset, preset_names())):
            warn_if_doubtful(given)
    assert caplog.records == []


@pytest.mark.parametrize("search", [optimal_search, minimum_waste_search])
def test_a_search_warns_of_the_rates_that_it_builds_on(search: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        search(
            torch.nn.Linear(8, 8),
            1,
            inp={"input": torch.ones(1, 8)},
            step_fn=lambda model, inp: model(**inp).sum().backward(),
            hardware=doubtful_profile(),
        )
    assert [record.getMessage().count("host_memory_bytes_per_s") for record in caplog.records] == [1]


def test_the_processor_has_a_name_even_where_the_system_keeps_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Some CPU 9000\n")
    assert cpu_name(info).startswith("Some CPU 9000, ")
    assert cpu_name(tmp_path / "none").split(",")[0] != ""
    assert device_name_here("cpu") == cpu_name()


@pytest.mark.parametrize("absurd", [1e-300, 0.5, 1e37, 1e308])
def test_rates_no_machine_has_are_refused_by_name(absurd: float) -> None:
    for field in ("host_to_device_bytes_per_s", "host_adam_numel_per_s", "network_bytes_per_s"):
        with pytest.raises(InputError, match=f"{field}.* a second, found"):
            dataclasses.replace(preset("h200"), **{field: absurd})
    with pytest.raises(InputError, match="flops_per_s.bfloat16"):
        dataclasses.replace(preset("h200"), flops_per_s={"bfloat16": absurd})
    with pytest.raises(InputError, match="per_s"):
        RateFit(0.0, absurd, 0.0)
