"""How things are timed: a `Workload` for growing sizes, on how much memory, how often, and until when."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elixir.errors import ElixirError, InputError, RankError
from elixir.hardware.memory import cache_bytes, check_device, free_device_bytes
from elixir.microbench.fitting import MIN_POINTS, Series, threads_text
from elixir.microbench.ranks import ALONE, Ranks
from elixir.units import MIB

HELD_CYCLES = 4_000_000
"""Clock cycles, 2 to 3 ms, for which a CUDA device is held while the host submits what is timed."""
SUBMITTED_S = 1.5e-3
"""Time that the host may take for that."""
QUEUED_S = 5e-3
"""Time of the runs on a CUDA device that follow each other without a wait, as the operators of a step do."""
MOST_QUEUED = 50
CACHES = 4
"""Times the caches of the last level that are walked through: a server's hold hundreds of MiB."""
_MIN_S = 1e-9
"""A clock too coarse for the work would otherwise give zero, and an infinite rate."""
Progress = Callable[[str, int, int], None]
"""Called with a short text before each measurement, how many are done, and of how many."""
Run = Callable[[], Any]
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Effort:
    """How long to measure, and on how much memory."""

    min_repeats: int
    max_repeats: int
    budget_s: float
    """Time for one amount: stop repeating after this long, once `min_repeats` are done."""
    amounts: int
    """How many amounts a sweep over sizes takes."""
    buffer_bytes: int
    """Size of one buffer; at most three are alive at a time."""
    adam_numel: int
    """Elements of the largest Adam step, 16 bytes each."""
    longest_s: float
    """Amounts of compute grow until one would take about this long."""


_EFFORTS = {
    # Host buffers keep the whole process within 1 GiB, unless its cache is too large for that; device buffers are as
    # large as a link needs to show its rate.
    ("cpu", False): Effort(5, 20, 0.12, 7, 128 * MIB, 24 * 10**6, 0.2),
    ("cpu", True): Effort(3, 5, 0.01, 4, 64 * MIB, 8 * 10**6, 0.02),
    ("cuda", False): Effort(5, 20, 0.12, 9, 512 * MIB, 128 * 10**6, 0.05),
    ("cuda", True): Effort(3, 5, 0.01, 4, 128 * MIB, 32 * 10**6, 0.01),
}


@dataclass(frozen=True)
class Bench:
    """The device to measure, how thoroughly, and by how many ranks at once."""

    device: torch.device
    quick: bool = False
    ranks: Ranks = ALONE
    fixed: Effort | None = None
    """The effort, whatever the device and its free memory."""

    def effort(self) -> Effort:
        """Effort for the device, the same on all ranks.

        Buffers never take more than half of the memory that is free there; ranks on a host share what is free. A quick
        measurement uses small ones, so a large cache shows as too much bandwidth.

        Raises:
            InputError: there is not even a MiB for a buffer.
        """
        if self.fixed is not None:
            return self.fixed
        device = self.device
        plan, share = _EFFORTS[device.type, self.quick], self.ranks.local_size if device.type == "cpu" else 1
        cold_bytes = 0 if self.quick else CACHES * cache_bytes(device)
        # Three buffers are walked through together, or the four tensors of an Adam step.
        wanted_bytes = max(plan.buffer_bytes, cold_bytes // 3)
        buffer_bytes = min(wanted_bytes // share, free_device_bytes(device) // (6 * share)) // MIB * MIB
        if buffer_bytes <= 0:
            raise InputError(f"too little free memory on {device} to measure anything; end what else runs there")
        adam_numel = min(max(plan.adam_numel, cold_bytes // 16) // share, 3 * buffer_bytes // 16)
        return dataclasses.replace(
            plan,
            buffer_bytes=int(self.ranks.least(buffer_bytes)),
            adam_numel=int(self.ranks.least(adam_numel)),
        )

    def sizes(self, smallest: int, multiple: int, largest: int | None = None) -> list[int]:
        """Growing amounts, as many as the effort takes, up to `largest`; None: up to the size of one buffer."""
        plan = self.effort()
        return geometric(smallest, largest or plan.buffer_bytes, plan.amounts, multiple)

    def on(self, device: torch.device | str) -> Bench:
        """The same bench, measuring another device."""
        return dataclasses.replace(self, device=torch.device(device))

    @property
    def all_ranks(self) -> str:
        """The end of the keys of what several ranks measure at once."""
        return ".all_ranks" if self.ranks.size > 1 else ""

    def text(self, what: str) -> str:
        """`what` with the threads that a host rate depends on, and the ranks that ran it at once."""
        if self.device.type == "cpu":
            what += f", {threads_text()}"
        return what if self.ranks.size == 1 else f"{what}, {self.ranks.size} ranks at once, the slowest"


def median_seconds(
    run: Callable[[], object], device: torch.device, plan: Effort, ranks: Ranks = ALONE
) -> tuple[tuple[float], int]:
    """Returns the median seconds of one `run()` on `device`, and the number of runs. One run before that is not
    counted: it pays for page faults, compilation and library start-up. With several ranks a run takes as long as on the
    slowest of them."""
    # What ranks do together they do equally often, and begin together, which held devices would not.
    held = device.type == "cuda" and ranks.size == 1
    queued = queued_runs(run, device) if held else 1
    (seconds,), repeats = repeat(lambda: (seconds_of(run, device, queued, held=held),), plan, ranks)
    return (seconds,), repeats * queued


def repeat(once: Callable[[], tuple[float, ...]], plan: Effort, ranks: Ranks = ALONE) -> tuple[tuple[float, ...], int]:
    """Returns medians of the seconds that `once` gives, and the number of runs; all ranks start each run together."""
    once()
    runs: list[tuple[float, ...]] = []
    began = time.perf_counter()
    while len(runs) < plan.max_repeats:
        # All ranks must stop after the same run, or one would wait for the others for ever.
        if len(runs) >= plan.min_repeats and ranks.slowest(time.perf_counter() - began) > plan.budget_s:
            break
        ranks.barrier()
        runs.append(tuple(ranks.slowest(seconds) for seconds in once()))
    return tuple(max(statistics.median(column), _MIN_S) for column in zip(*runs, strict=True)), len(runs)


def queued_runs(run: Callable[[], object], device: torch.device) -> int:
    """How many runs are timed together: about `QUEUED_S` of them, as far as the host submits them while it may."""
    run()
    one_s = seconds_of(run, device, held=True)
    torch.cuda.synchronize(device)
    submitted_s = seconds_of(run)
    fitting = min(QUEUED_S / max(one_s, _MIN_S), SUBMITTED_S / max(submitted_s, _MIN_S))
    return max(1, min(int(fitting), MOST_QUEUED))


def seconds_of(run: Callable[[], object], device: torch.device = HOST, queued: int = 1, *, held: bool = False) -> float:
    """Seconds of one of `queued` runs: by events on a CUDA device's current stream, otherwise by the clock.

    With `held` a CUDA device is held until the host has submitted them: in a step it has work in its queue, too, and an
    operator starts when the one before it ends.
    """
    if device.type != "cuda":
        began_s = time.perf_counter()
        run()
        return time.perf_counter() - began_s
    with torch.cuda.device(device):
        cuda: Any = torch.cuda  # its classes carry no annotations
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        hold = getattr(cuda, "_sleep", None)  # not a public name; without it, short operators seem to take longer
        if hold is not None and held:
            hold(HELD_CYCLES)
        start.record()
        for _ in range(queued):
            run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / queued


def default_device(ranks: Ranks) -> torch.device:
    """Each rank's own CUDA device, or the CPU on a machine without one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return check_device(f"cuda:{ranks.local_rank}")


@dataclass(frozen=True)
class Job:
    """One thing to measure."""

    title: str
    keys: tuple[str, ...]
    """The keys of `HardwareProfile.fits` for which it gives series, in order."""
    measure: Callable[[], list[Series]] = dataclasses.field(default=list, kw_only=True)
    """Gives them, if the job is no `Workload`."""

    def series(self) -> list[Series]:
        """Measures: one series for each key."""
        return self.measure()

    def measured(self) -> list[Series]:
        """Measures and fits; measures once more if there is no fit, since something came between.

        What the device cannot do, or has no memory for, becomes a problem with a name.
        """
        try:
            first = [series.fitted() for series in self.series()]
            if all(result.fit is not None for result in first):
                return first
            # All ranks have the same points, so all of them do this or none.
            again = [series.fitted() for series in self.series()]
            return [a if a.fit is not None else b for a, b in zip(first, again, strict=True)]
        except RankError:
            raise  # the other ranks are gone: nothing after this would work either
        except (ElixirError, RuntimeError, NotImplementedError) as error:
            problem = (str(error).strip() or type(error).__name__).splitlines()[0]
            return [Series(key, problem=problem) for key in self.keys]


@dataclass(frozen=True)
class Workload(Job):
    """Work that is timed for growing sizes."""

    bench: Bench
    how: str
    """A description of the work."""
    sizes: Sequence[int]
    begin: Callable[[], Callable[[int], Run]]
    """Takes the memory that all sizes share, and gives the function that prepares a size. Sizes are prepared one after
    the other, so that memory of one is free for the next. With several keys, a run gives the seconds of each itself."""
    amount: Callable[[int], float] = float
    """Bytes, elements or FLOPs of a size, as the key counts."""
    longest_s: float = math.inf
    """Limit on the seconds of a size, once there are enough for a fit."""

    def series(self) -> list[Series]:
        """Times growing sizes."""
        bench, plan, prepare = self.bench, self.bench.effort(), self.begin()
        points: list[tuple[float, tuple[float, ...]]] = []
        fewest = plan.max_repeats
        for size in self.sizes:
            amount = float(self.amount(size))
            if len(points) >= MIN_POINTS and max(points[-1][1]) * amount / points[-1][0] > self.longest_s:
                break
            run = prepare(size)
            if len(self.keys) > 1:
                seconds, repeats = repeat(run, plan, bench.ranks)
            else:
                seconds, repeats = median_seconds(run, bench.device, plan, bench.ranks)
            points.append((amount, seconds))
            fewest = min(fewest, repeats)
            del run  # or its memory would not be free for the next
        how = bench.text(self.how)
        return [
            Series(key, tuple((amount, seconds[column]) for amount, seconds in points), fewest, how, bench.ranks.size)
            for column, key in enumerate(self.keys)
        ]


def run_jobs(jobs: Sequence[Job], begins: Callable[[str], None] | None = None) -> list[Series]:
    """The results of `jobs`, run in order; `begins` is called with the title of each."""
    results: list[Series] = []
    for job in jobs:
        if begins is not None:
            begins(job.title)
        results += job.measured()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what one measurement used is free for the next
    return results


def geometric(smallest: int, largest: int, count: int, multiple: int = 1) -> list[int]:
    """`count` amounts or fewer, evenly spread on a logarithmic scale, each a multiple; the last is `largest`."""
    smallest = min(smallest, largest)
    exact = [smallest * (largest / smallest) ** (step / max(count - 1, 1)) for step in range(count)]
    return sorted({max(multiple, round(amount / multiple) * multiple) for amount in exact[:-1]} | {largest})


def windows(buffer: torch.Tensor, numel: int) -> list[torch.Tensor]:
    """Pieces of `numel` elements that follow each other in `buffer`, as many as there are."""
    return [buffer[start : start + numel] for start in range(0, buffer.numel() - numel + 1, numel)]


def walking(run: Callable[..., object], buffers: Sequence[torch.Tensor]) -> Callable[[int], Run]:
    """The work of `run` on windows of so many bytes, first those that come first in all `buffers`, then the second, and
    so on.

    None of them is found in a cache, as in a step that walks through all weights.
    """

    def prepare(nbytes: int) -> Run:
        turns = itertools.cycle(zip(*(windows(each, nbytes // each.itemsize) for each in buffers), strict=True))
        return lambda: run(*next(turns))

    return prepare
