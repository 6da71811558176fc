"""Seconds of an Adam step by number of elements, on a device and on the host by thread count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from elixir.hardware.host_share import host_share, host_view, rank_threads, use_threads
from elixir.microbench.bench import Bench, Run, Workload, geometric, windows
from elixir.microbench.fitting import Series, threads_text
from elixir.units import dtype_name

STATE_DTYPES = (torch.float32, torch.bfloat16)
SMALLEST_NUMEL = 2**16
LEAST_WINDOWS = 32
"""Parameters that are stepped one after the other, as far as there is memory."""


@dataclass(frozen=True)
class HostAdam(Workload):
    """Adam on the host, on a separate thread with a number of OpenMP threads, as in training."""

    threads: int = 1
    cores: Sequence[int] | None = None
    """The cores that it is bound to; None: any."""

    def series(self) -> list[Series]:
        """Times growing steps on that thread, which torch's number of threads for others does not reach."""
        with ThreadPoolExecutor(1, "elixir adam") as worker:
            worker.submit(use_threads, self.threads, self.cores).result()
            return worker.submit(super().series).result()


def adam_jobs(bench: Bench) -> list[Workload]:
    """The host by thread count and dtype of the states, then the device where it is not the host."""
    jobs: list[Workload] = [
        adam_work(bench.on("cpu"), dtype, threads) for threads in thread_counts() for dtype in STATE_DTYPES
    ]
    if bench.device.type != "cpu":
        jobs += [adam_work(bench, dtype) for dtype in STATE_DTYPES]
    return jobs


def all_threads_jobs(bench: Bench) -> list[Workload]:
    """Adam as several ranks at once run it in training: on the host each with its part of the cores, and on its
    device."""
    share = host_share(bench.ranks.exchange(host_view()), bench.ranks.rank)
    threads, cores = rank_threads(share, torch.get_num_threads() if bench.device.type == "cpu" else 0)
    # On machines that differ all measure what the smallest rank has: they share one key.
    fewest = int(bench.ranks.least(threads))
    jobs = [adam_work(bench.on("cpu"), torch.float32, fewest, cores)]
    return jobs if bench.device.type == "cpu" else [*jobs, adam_work(bench, torch.float32)]


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


def adam_work(
    bench: Bench, dtype: torch.dtype, threads: int | None = None, cores: Sequence[int] | None = None
) -> Workload:
    """``torch.optim.AdamW(fused=True)`` over one flat parameter, its gradient and both moments of `dtype`.

    The step of a sharded optimizer looks like this: a long flat buffer, nothing to launch twice. With fp32 it reads and
    writes 28 bytes per element, with bf16 14, so it is bound by memory unless cores are slow.

    Args:
        bench: says on which device.
        dtype: of all four tensors.
        threads: of the host's Adam; None: the device's.
        cores: as of `HostAdam`.
    """
    plan = bench.effort()
    sizes = geometric(SMALLEST_NUMEL, plan.adam_numel, plan.amounts, SMALLEST_NUMEL)

    def prepare(numel: int) -> Run:
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

    name = dtype_name(dtype)
    how = (
        f"torch AdamW(fused=True) on {bench.device}, {name} parameter, gradient and states, "
        f"{sizes[0] / 1e6:.2g} to {sizes[-1] / 1e6:.3g} M elements"
    )
    family = "device_adam" if threads is None else f"host_adam.{threads}"
    key = family + ("" if dtype == torch.float32 else f".{name}") + (".all_ranks" if bench.ranks.size > 1 else "")
    where = f"on {bench.device}" if threads is None else f"on the host, {threads_text(threads)}"
    work = (f"Adam {where}, {name} states", (key,), bench, how, sizes, lambda: prepare)
    return Workload(*work) if threads is None else HostAdam(*work, threads=threads, cores=cores)
