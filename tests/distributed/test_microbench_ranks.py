"""Measurements of several ranks at once."""

from __future__ import annotations

import dataclasses
import os
import time

import torch

from elixir.hardware.host_share import HostView, adam_threads
from elixir.hardware.profile import preset
from elixir.hardware.rate_fit import RateFit
from elixir.microbench import bench as bench_module
from elixir.microbench import compute, machine
from elixir.microbench.bench import Bench, Effort, median_seconds, run_jobs
from elixir.microbench.fitting import Series
from elixir.microbench.ranks import Ranks
from tests.common.spawn import run_ranks

TINY = Effort(2, 2, 0.0, 4, 2**21, 2**18, 1e-3)


def ranks_here(rank: int, size: int) -> Ranks:
    return Ranks(size, rank, size, rank)


def measured(rank: int, size: int) -> dict[str, Series]:
    bench_module._EFFORTS = dict.fromkeys([("cpu", False), ("cpu", True)], TINY)
    bench = Bench(torch.device("cpu"), True, ranks_here(rank, size))
    return {result.key: result for result in run_jobs(machine.machine_jobs(bench))}


def test_all_ranks_have_the_same_points_under_keys_that_say_so() -> None:
    first, second = run_ranks(2, measured)
    assert first == second
    keys = set(first)
    assert {"all_gather.2", "reduce_scatter.2", "host_to_device.all_ranks", "host_to_device.both.all_ranks"} <= keys
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert f"host_adam.{adam_threads(cores, 2, 1)}.all_ranks" in keys
    assert all(series.points for series in first.values())
    assert all(series.ranks == 2 for series in first.values())
    # The amount is the whole buffer, which a rank's buffer of 1 MiB bounds here.
    assert max(amount for amount, _ in first["all_gather.2"].points) == 2**20


def on_a_gpu_machine(rank: int, size: int) -> tuple[list[str], set[tuple[int, tuple[int, ...]]]]:
    """The ranks of a GPU machine of 8 cores measure the host's Adam on their threads and cores."""
    bench_module._EFFORTS = dict.fromkeys([("cpu", False), ("cpu", True)], TINY)
    compute.host_view = lambda: HostView("here", tuple(range(8)), float("inf"))
    asked: set[tuple[int, tuple[int, ...]]] = set()
    compute.use_threads = lambda threads, cores: asked.add((threads, cores))
    bench = Bench(torch.device("cuda", 0), True, ranks_here(rank, size), fixed=TINY)
    jobs = [job for job in compute.adam_jobs(bench) if job.keys[0].startswith("host_adam")]
    return [result.key for result in run_jobs(jobs) if result.points], asked


def test_ranks_measure_the_hosts_adam_on_what_each_has_in_training() -> None:
    """Not on the one thread that torchrun would tell OpenMP to use."""
    answers = run_ranks(2, on_a_gpu_machine)
    assert [keys for keys, _ in answers] == [["host_adam.3.all_ranks"]] * 2
    if hasattr(os, "sched_setaffinity"):
        assert [asked for _, asked in answers] == [{(3, (0, 1, 2, 3))}, {(3, (4, 5, 6, 7))}]


def one_is_slow(rank: int, size: int) -> tuple[tuple[float], int]:
    plan = Effort(2, 50, 0.03, 4, 2**21, 2**18, 1e-3)
    return median_seconds(lambda: time.sleep(0.02 * rank), torch.device("cpu"), plan, ranks_here(rank, size))


def test_a_run_takes_as_long_as_on_the_slowest_rank_and_all_stop_together() -> None:
    first, second = run_ranks(2, one_is_slow)
    assert first == second
    assert first[0][0] >= 0.02


def test_keys_of_several_ranks_are_keys_of_a_profile() -> None:
    fits = dict.fromkeys(
        ("host_adam.1.all_ranks", "host_to_device.both.all_ranks", "all_gather.2"), RateFit(0.0, 1.0, 0.0)
    )
    assert dataclasses.replace(preset("cpu"), fits=fits).fits == fits
