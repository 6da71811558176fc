"""Seconds of an Adam step by number of elements, on a device and on the host by thread count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from elixir.hardware.host_share import host_share, host_view, rank_threads
from elixir.hardware.own_threads import use_threads
from elixir.microbench.bench import Bench, threads_text
from elixir.microbench.fitting import Job, Series, geometric, sweep, windows
from elixir.units import dtype_name

STATE_DTYPES = (torch.float32, torch.bfloat16)
SMALLEST_NUMEL = 2**16
LEAST_WINDOWS = 32
"""Parameters that are stepped one after the other, as far as there is memory."""


def adam_jobs(bench: Bench) -> list[Job]:
    """The host by thread count and dtype of the states, then the device where it is not the host."""
    host = bench.on("cpu")
    jobs = [
        _host_job(f"Adam on the host, {dtype_name(dtype)} states, {threads_text(threads)}", host, dtype, threads)
        for threads in thread_counts()
        for dtype in STATE_DTYPES
    ]
    return jobs + device_adam_jobs(bench)


def device_adam_jobs(bench: Bench) -> list[Job]:
    """The jobs of `adam_jobs` on a device other than the host; none for ``cpu``."""
    if bench.device.type == "cpu":
        return []
    return [_device_job(f"Adam on {bench.device}, {dtype_name(dtype)} states", bench, dtype) for dtype in STATE_DTYPES]


def all_threads_jobs(bench: Bench) -> list[Job]:
    """Adam as several ranks at once run it in training: on the host each with its part of the cores, and on its
    device."""
    share = host_share(bench.ranks.exchange(host_view()), bench.ranks.rank)
    threads, cores = rank_threads(share, torch.get_num_threads() if bench.device.type == "cpu" else 0)
    # On machines that differ all measure what the smallest rank has: they share one key.
    fewest = int(bench.ranks.least(threads))
    jobs = [_host_job("Adam on the host, all ranks at once", bench.on("cpu"), torch.float32, fewest, cores)]
    if bench.device.type != "cpu":
        jobs.append(_device_job("Adam on all devices at once", bench, torch.float32))
    return jobs


def thread_counts() -> list[int]:
    """1, 2, 4, ... up to the cores that this process may use, which are always among them; and torch's number.

    The most are not what ``OMP_NUM_THREADS`` says, which torchrun sets to 1: the runtime's Adam does not follow that
    either.
    """
    most = host_share([host_view()], 0).all_cores
    return sorted({2**power for power in range(most.bit_length()) if 2**power < most} | {most, compute_threads()})


def compute_threads() -> int:
    """Number of threads of updates if the CPU is the device: torch's number, but no more than there are cores."""
    return min(torch.get_num_threads(), host_share([host_view()], 0).all_cores)


def adam_series(bench: Bench, dtype: torch.dtype = torch.float32, key: str = "device_adam") -> Series:
    """``torch.optim.AdamW(fused=True)`` over one flat parameter, its gradient and both moments of `dtype`.

    The step of a sharded optimizer looks like this: a long flat buffer, nothing to launch twice. With fp32 it reads and
    writes 28 bytes per element, with bf16 14, so it is bound by memory unless cores are slow.
    """
    plan = bench.effort()
    counts = geometric(SMALLEST_NUMEL, plan.adam_numel, plan.amounts, SMALLEST_NUMEL)

    def prepare(numel: int) -> Callable[[], object]:
        walked = max(numel * LEAST_WINDOWS, plan.cold_bytes // (4 * dtype.itemsize))
        weights = torch.ones(max(numel, min(plan.adam_numel, walked)), device=bench.device, dtype=dtype)
        gradients = torch.full_like(weights, 1e-3)
        steps: list[Callable[[], object]] = []
        for piece, gradient in zip(windows(weights, numel), windows(gradients, numel), strict=True):
            parameter = torch.nn.Parameter(piece)
            parameter.grad = gradient
            optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
            optimizer.step()  # makes the states, whose pages are then there
            steps.append(optimizer.step)
        turns = itertools.cycle(steps)
        return lambda: next(turns)()

    how = (
        f"torch AdamW(fused=True) on {bench.device}, {dtype_name(dtype)} parameter, gradient and states, "
        f"{counts[0] / 1e6:.2g} to {counts[-1] / 1e6:.3g} M elements"
    )
    cases = [(count, partial(prepare, count)) for count in counts]
    return sweep(bench, plan, key, "elements", how, cases)


def _host_job(title: str, bench: Bench, dtype: torch.dtype, threads: int, cores: Sequence[int] | None = None) -> Job:
    key = _key(f"host_adam.{threads}", dtype, bench)

    def run() -> Series:
        # As in training: on a separate thread, which torch's number for others does not reach.
        with ThreadPoolExecutor(1, "elixir adam") as worker:
            worker.submit(use_threads, threads, cores).result()
            return worker.submit(adam_series, bench, dtype, key).result()

    return Job(title, (key,), run)


def _device_job(title: str, bench: Bench, dtype: torch.dtype) -> Job:
    key = _key("device_adam", dtype, bench)
    return Job(title, (key,), partial(adam_series, bench, dtype, key))


def _key(family: str, dtype: torch.dtype, bench: Bench) -> str:
    state = "" if dtype == torch.float32 else f".{dtype_name(dtype)}"
    return family + state + (".all_ranks" if bench.ranks.size > 1 else "")
