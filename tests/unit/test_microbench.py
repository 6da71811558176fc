"""The micro-benchmarks measure what they say and stay within their time, memory and manners."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from elixir.errors import InputError
from elixir.free_memory import free_host_bytes, total_host_bytes
from elixir.hardware import HardwareProfile, load_hardware
from elixir.microbench import (
    Measurement,
    adam_rate,
    as_json,
    as_table,
    device_to_device_rate,
    host_to_device_rate,
    matmul_rate,
    measure,
    measurement,
    memory_rate,
)
from elixir.microbench.machine import cpu_name
from elixir.microbench.measurement import Effort, effort, format_rate, median_seconds
from elixir.microbench.script import run_script

CPU = torch.device("cpu")
PROFILE_SCRIPTS = Path(__file__).parents[2] / "profile"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")


@pytest.fixture(scope="module")
def measured() -> tuple[HardwareProfile, list[str], float]:
    """One quick measurement, what it told, and the seconds it took."""
    told: list[str] = []
    began = time.perf_counter()
    profile = measure(told.append, quick=True)
    return profile, told, time.perf_counter() - began


@no_gpu
def test_a_measured_profile_names_the_source_of_every_number(
    measured: tuple[HardwareProfile, list[str], float], tmp_path: Path
) -> None:
    profile, told, _ = measured
    numeric = [
        field.name
        for field in dataclasses.fields(profile)
        if isinstance(getattr(profile, field.name), (int, float, dict)) and field.name != "sources"
    ]
    assert [name for name in numeric if not profile.sources.get(name)] == []
    assert profile.measured_at is not None
    assert profile.device_memory_bytes == total_host_bytes()
    assert len(told) >= 6
    assert load_hardware(str(profile.save(tmp_path / "hw.json"))) == profile


@no_gpu
def test_measured_rates_are_those_of_a_computer(measured: tuple[HardwareProfile, list[str], float]) -> None:
    """Wide bounds: a factor of a thousand (a unit mixed up) falls outside, a slow or a large machine does not."""
    profile, _, _ = measured
    assert 2e8 < profile.host_to_device_bytes_per_s < 5e12
    assert 2e8 < profile.host_memory_bytes_per_s < 5e12
    assert 1e7 < profile.host_adam_numel_per_s < 1e12
    assert 1e8 < profile.flops_rate("float32") < 1e15


def test_rates_divide_the_right_amount_by_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of two seconds a run, every rate is exactly its bytes, elements or FLOPs halved."""
    for module in ("transfers", "adam", "compute"):
        monkeypatch.setattr(f"elixir.microbench.{module}.median_seconds", lambda run, device, plan: (2.0, 3))
    plan = effort(CPU, quick=True)
    assert memory_rate(CPU, quick=True).value == 3 * plan.buffer_bytes / 2
    assert host_to_device_rate(CPU, quick=True).value == plan.buffer_bytes / 2
    assert adam_rate(CPU, quick=True).value == plan.adam_numel / 2
    rate = matmul_rate(torch.float32, CPU, quick=True)
    size = int(rate.how.split(" ")[0])
    assert rate.value == 2 * size**3 / 2
    assert rate.source.startswith("measured, median of 3: ")


def test_the_first_run_is_not_counted_and_the_median_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.1, 1.0, 1.5, 2.0, 2.3])  # began; then pairs: 0.1, 0.5, 0.3
    runs: list[int] = []
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: next(clock))
    seconds, repeats = median_seconds(lambda: runs.append(1), CPU, Effort(3, 3, 1.0, 1, 1, 1.0))
    assert (seconds, repeats, len(runs)) == (pytest.approx(0.3), 3, 4)


def test_a_slow_run_stops_at_its_budget() -> None:
    runs: list[int] = []

    def slow() -> None:
        runs.append(1)
        time.sleep(0.02)

    _, repeats = median_seconds(slow, CPU, Effort(2, 1000, 0.05, 1, 1, 1.0))
    assert 2 <= repeats <= 5
    assert len(runs) == repeats + 1


def test_buffers_never_take_more_than_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (free_host_bytes(), 100 * 2**20):
        monkeypatch.setattr(measurement, "free_device_bytes", lambda device, free=free: free)
        for quick in (True, False):
            plan = effort(CPU, quick)
            assert 3 * plan.buffer_bytes <= min(free // 2, 2**30)
            assert 16 * plan.adam_numel <= min(free // 2, 2**30)
    monkeypatch.setattr(measurement, "free_device_bytes", lambda device: 2**20)
    with pytest.raises(InputError, match="too little free memory"):
        effort(CPU, quick=True)


def test_threads_and_random_state_stay_as_they_were() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    matmul_rate(torch.float32, quick=True)
    adam_rate(quick=True)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_devices_and_dtypes_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(InputError, match="cuda:"):
        memory_rate(f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(InputError, match="no device"):
        memory_rate("warp")
    with pytest.raises(InputError, match="cuda and cpu"):
        adam_rate("meta")
    with pytest.raises(InputError, match="two different CUDA devices"):
        device_to_device_rate("cpu", "cpu")
    with pytest.raises(InputError, match="cannot multiply bool"):
        matmul_rate(torch.bool, quick=True)


def test_reports() -> None:
    rates = [Measurement("link", 2.5e10, "bytes/s", 5, "copy"), Measurement("adam cpu", 3.0, "elements/s", 12, "step")]
    first, second = as_table(rates).splitlines()
    assert "25.00 Gbytes/s" in first
    assert first.index("median") == second.index("median")
    assert json.loads(as_json(rates))["measurements"][0]["value"] == 2.5e10
    assert as_table([]) == ""
    assert format_rate(999.0, "FLOP/s") == "999.00 FLOP/s"


def test_the_processor_has_a_name_even_where_the_system_keeps_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Some CPU 9000\n")
    assert cpu_name(info).startswith("Some CPU 9000, ")
    assert cpu_name(tmp_path / "none").split(",")[0] != ""


def test_scripts_stand_alone(tmp_path: Path) -> None:
    out = tmp_path / "adam.json"
    command = [sys.executable, str(PROFILE_SCRIPTS / "adam.py"), "--quick", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROFILE_SCRIPTS.parent, env=with_path())
    assert done.returncode == 0, done.stderr
    (rate,) = json.loads(out.read_text())["measurements"]
    assert rate["unit"] == "elements/s"
    assert rate["value"] > 0
    assert "adam cpu" in done.stdout


def test_a_bad_device_or_output_ends_a_script_before_it_measures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def never(device: torch.device, quick: bool) -> list[Measurement]:
        raise AssertionError("measured before the arguments were checked")

    for arguments in (["--device", "warp"], ["--out", str(tmp_path / "no" / "such.json")]):
        with pytest.raises(SystemExit) as ended:
            run_script(never, None, arguments)
        assert ended.value.code == 2
        assert "error: " in capsys.readouterr().err.splitlines()[-1]


def with_path() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(PROFILE_SCRIPTS.parent), "OMP_NUM_THREADS": "1"}
