"""The micro-benchmarks measure what they say, fit what can be fitted, and stay within their memory and manners."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from elixir.errors import InputError, RankError
from elixir.hardware.memory import cache_bytes, check_device, free_host_bytes
from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.rate_fit import LARGEST_ALONE, RateFit
from elixir.microbench import bench as bench_module
from elixir.microbench import measure
from elixir.microbench.bench import Bench, Effort, Job, median_seconds
from elixir.microbench.compute import (
    adam_jobs,
    compute_jobs,
    matmul_work,
)
from elixir.microbench.fitting import Series, fit_points
from elixir.microbench.ranks import Ranks, joined
from elixir.microbench.transfers import collective_jobs, transfer_jobs
from tests.common import inside
from tests.common.profile_scripts import PROFILE, frame

CPU = torch.device("cpu")
QUICK = Bench(CPU, quick=True)
TINY = Effort(2, 2, 0.0, 4, 2**22, 2**18, 1e-3)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of 2 MiB and two runs each: enough to see what is measured, if not how fast it is."""
    inside.measure_with(monkeypatch, TINY)


def line(
    latency_s: float, per_s: float, amounts: tuple[float, ...] = (1e6, 1e7, 1e8, 1e9)
) -> list[tuple[float, float]]:
    return [(amount, latency_s + amount / per_s) for amount in amounts]


def series(points: list[tuple[float, float]], key: str = "host_to_device", ranks: int = 1) -> Series:
    return Series(key, tuple(points), 5, "copy", ranks)


@dataclasses.dataclass(frozen=True)
class Given(Job):
    """A job that gives what is asked of it, one after the other."""

    left: list[Series | Exception]

    def series(self) -> list[Series]:
        first = self.left.pop(0)
        if isinstance(first, Exception):
            raise first
        return [first]


# ----------------------------------------------------------------------------------------------------------------- fits


def test_latency_is_never_negative() -> None:
    # In a cache the small ones are faster than the rate of large amounts.
    fit = fit_points([(1e6, 0.8e-4), (1e7, 1e-3), (1e8, 1e-2), (1e9, 1e-1)])
    assert fit.latency_s == 0.0
    assert fit.per_s == pytest.approx(1e10, rel=0.1)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "3 different amounts"),
        (line(1e-5, 1e9)[:2], "3 different amounts"),
        ([(1e6, 1e-3)] * 5, "3 different amounts"),
        ([(1e6, 1.0), (1e7, 1.0), (1e8, 1.0)], "hardly grow"),
        ([(1e6, 1.0), (1e7, 0.9), (1e8, 0.5)], "hardly grow"),
        (line(8e-3, 1e9), "latency of 8.0 ms"),
        ([*line(1e-5, 1e9), (2e9, 9.0)], "do not describe it"),
        ([*line(1e-5, 1e9), (2e9, math.nan)], "above 0 and finite"),
        ([*line(1e-5, 1e9), (2e9, math.inf)], "above 0 and finite"),
        ([*line(1e-5, 1e9), (0.0, 1.0)], "above 0 and finite"),
        ([*line(1e-5, 1e9), (2e9, 0.0)], "above 0 and finite"),
    ],
)
def test_a_fit_that_cannot_be_believed_is_refused(points: list[tuple[float, float]], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        fit_points(points)
    result = series(points).fitted()
    assert result.fit is None
    assert reason in result.problem


def test_without_a_fit_the_rate_is_that_of_the_largest_amount() -> None:
    result = series([(1e6, 1.0), (1e8, 2.0)]).fitted()
    assert result.per_s == 5e7
    assert "no fit" in result.source
    assert LARGEST_ALONE in result.source
    assert series(line(1e-5, 1e9)).fitted().per_s == pytest.approx(1e9)


@pytest.mark.parametrize(
    "error", [RuntimeError("not implemented for 'Half'\nin file"), InputError("too little memory")]
)
def test_what_a_device_cannot_do_is_a_problem_with_a_name(error: Exception) -> None:
    (result,) = Given("", ("matmul.float16.square",), [error]).measured()
    assert (result.key, result.fit, result.points) == ("matmul.float16.square", None, ())
    assert result.problem == str(error).splitlines()[0]
    with pytest.raises(InputError, match=r"matmul\.float16\.square could not be measured"):
        _ = result.per_s


def test_a_lost_rank_ends_it_all() -> None:
    with pytest.raises(RankError):
        Given("", ("all_gather.2",), [RankError("gone")]).measured()


# --------------------------------------------------------------------------------------------------------------- timing


def test_a_server_s_cache_is_walked_through_several_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cpu in range(4):  # of which two share the cache of the last level
        for level, size, shared in ((1, "48K", f"{cpu}"), (2, "2048K", f"{cpu}"), (3, "153600K", f"{cpu // 2}-")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    (tmp_path / "cpu0" / "cache" / "index4").mkdir()  # without a size
    cache = cache_bytes("cpu", tmp_path)
    assert cache == 300 * 2**20
    assert cache_bytes("cpu", tmp_path / "absent") == 0
    monkeypatch.setattr(bench_module, "cache_bytes", lambda device: cache)
    monkeypatch.setattr(bench_module, "free_device_bytes", lambda device: 64 * 2**30)
    plan = Bench(CPU).effort()
    assert 3 * plan.buffer_bytes >= 4 * cache - 3 * 2**20
    assert 16 * plan.adam_numel >= 4 * cache - 16
    assert QUICK.effort().buffer_bytes == 64 * 2**20


def test_a_slow_run_stops_at_its_budget() -> None:
    plan = dataclasses.replace(TINY, min_repeats=2, max_repeats=1000, budget_s=0.05)
    _, repeats = median_seconds(lambda: time.sleep(0.02), CPU, plan)
    assert 2 <= repeats <= 5


def test_buffers_never_take_more_than_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "cache_bytes", lambda device: 2**25)  # of a large one, buffers are larger
    for free in (free_host_bytes(), 100 * 2**20):
        monkeypatch.setattr(bench_module, "free_device_bytes", lambda device, free=free: free)
        for quick in (True, False):
            for sharers in (1, 2, 8):
                plan = Bench(CPU, quick, Ranks(local_size=sharers)).effort()
                assert sharers * 3 * plan.buffer_bytes <= min(free // 2, 2**30)
                assert sharers * 16 * plan.adam_numel <= min(free // 2, 2**30)
    monkeypatch.setattr(bench_module, "free_device_bytes", lambda device: 2**20)
    with pytest.raises(InputError, match="too little free memory"):
        QUICK.effort()


# --------------------------------------------------------------------------------------------------------- what is run


def test_jobs_promise_the_keys_they_give_and_profiles_accept_them(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.measure_with(monkeypatch, TINY)
    monkeypatch.setattr(Job, "measured", lambda job: job.series())
    jobs = [*transfer_jobs(QUICK), *adam_jobs(QUICK), *compute_jobs(QUICK, (torch.bfloat16,))]
    promised = [key for job in jobs for key in job.keys]
    assert len(promised) == len(set(promised))
    given_ = [result for job in jobs for result in job.measured()]
    assert [result.key for result in given_] == promised
    assert [result.key for result in given_ if not result.points] == []
    dataclasses.replace(preset("cpu"), fits=dict.fromkeys(promised, RateFit(0.0, 1.0, 0.0)))


@pytest.mark.usefixtures("tiny")
def test_devices_and_dtypes_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(InputError, match="cuda:"):
        check_device(f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(InputError, match="no device"):
        check_device("warp")
    with pytest.raises(InputError, match="expected a device of cuda"):
        check_device("meta")
    (result,) = matmul_work(QUICK, torch.bool).measured()
    assert "not implemented for 'Bool'" in result.problem
    assert collective_jobs(QUICK) == []


# -------------------------------------------------------------------------------------------------------- whole machine


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> tuple[HardwareProfile, list[str]]:
    """A measurement on tiny buffers in which every copy has a fit and every Adam step is without."""
    inside.measure_with(monkeypatch, TINY)

    def judged(job: Job) -> list[Series]:
        return [
            dataclasses.replace(each, problem="made to fail")
            if each.key.startswith("host_adam")
            else dataclasses.replace(each, fit=RateFit(1e-6, 7e9, 0.1, each.points))
            for each in job.series()
        ]

    monkeypatch.setattr(Job, "measured", judged)
    told: list[str] = []
    with caplog.at_level(logging.WARNING):
        profile = measure(lambda text, done, count: told.append(f"{done}/{count} {text}"), quick=True)
    return profile, told


# ----------------------------------------------------------------------------------------------------------- the ranks


def test_a_torchrun_environment_that_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun"), joined():
        pass
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="torchrun"), joined():
        pass


# ----------------------------------------------------------------------------------------------------- tables and JSON


def results() -> list[Series]:
    return [
        series(line(1e-5, 2.5e10)).fitted(),
        series(line(1e-5, 1e10), "host_to_device.all_ranks", ranks=4).fitted(),
        series([(1e6, 1.0), (1e7, 1.0), (1e8, 1.0)], "host_memory").fitted(),
        Series("matmul.float16.square", problem="not implemented"),
    ]


def test_json_has_points_fits_and_problems() -> None:
    first, _, third, fourth = json.loads(frame.as_json(results()))["series"]
    assert first["fit"]["per_s"] == pytest.approx(2.5e10)
    assert first["points"][0][0] == 1e6
    assert (third["fit"], fourth["fit"]) == (None, None)
    assert "hardly grow" in third["problem"]


# -------------------------------------------------------------------------------------------------------------- scripts


def test_scripts_stand_alone(tmp_path: Path) -> None:
    out = tmp_path / "bandwidth.json"
    command = [sys.executable, str(PROFILE / "bandwidth.py"), "--quick", "--device", "cpu"]
    command += ["--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROFILE.parent, env=with_path())
    assert done.returncode == 0, done.stderr
    found = {record["key"]: record for record in json.loads(out.read_text())["series"]}
    assert {"host_memory", "host_to_device", "host_to_device.both"} <= set(found)
    # Wide bounds: a factor of a thousand (a unit mixed up) falls outside, a slow or a large machine does not.
    amount, seconds = found["host_to_device"]["points"][-1]
    assert 2e8 < amount / seconds < 5e12
    assert "host_to_device" in done.stdout


def test_a_bad_device_or_output_ends_a_script_before_it_measures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def never(bench: Bench) -> list[Job]:
        raise AssertionError("measured before the arguments were checked")

    folder = tmp_path / "no"
    for arguments in (["--device", "warp"], ["--out", str(folder / "such.json")], ["--plot", "fits.pdf"]):
        with pytest.raises(SystemExit) as ended:
            frame.run_script(never, None, arguments)
        assert ended.value.code == 2
        assert "error: " in capsys.readouterr().err.splitlines()[-1]


def with_path() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(PROFILE.parent), "OMP_NUM_THREADS": "1"}
