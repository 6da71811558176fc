"""How things are timed: on how much memory, how often, and until when."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elixir.errors import InputError
from elixir.hardware.memory import cache_bytes, free_device_bytes
from elixir.microbench.ranks import Ranks
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
    cold_bytes: int = 0
    """Memory to walk through before any of it comes again, or it would be found in a cache."""


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
    ranks: Ranks = dataclasses.field(default_factory=Ranks)

    def effort(self, device: torch.device | None = None) -> Effort:
        """Effort for `device` (default: the one that is measured), the same on all ranks."""
        plan = effort(self.device if device is None else device, self.quick, sharers=self.ranks.local_size)
        if self.ranks.size == 1:
            return plan
        return dataclasses.replace(
            plan,
            buffer_bytes=int(self.ranks.least(plan.buffer_bytes)),
            adam_numel=int(self.ranks.least(plan.adam_numel)),
        )

    def on(self, device: str) -> Bench:
        """The same bench, measuring another device."""
        return dataclasses.replace(self, device=torch.device(device))

    def text(self, what: str) -> str:
        """`what` with the threads that a host rate depends on, and the ranks that ran it at once."""
        if self.device.type == "cpu":
            what += f", {threads_text()}"
        return what if self.ranks.size == 1 else f"{what}, {self.ranks.size} ranks at once, the slowest"


def effort(device: torch.device, quick: bool, sharers: int = 1) -> Effort:
    """Effort for a measurement of `device`, never more than half of the memory that is free there.

    `quick` uses small buffers, so a large cache shows as too much bandwidth. `sharers` processes measure at once; on a
    host they share what is free.

    Raises:
        InputError: there is not even a MiB for a buffer.
    """
    plan = _EFFORTS[device.type, quick]
    share = sharers if device.type == "cpu" else 1
    cold_bytes = 0 if quick else CACHES * cache_bytes(device)
    # Three buffers are walked through together, or the four tensors of an Adam step.
    wanted_bytes = max(plan.buffer_bytes, cold_bytes // 3)
    buffer_bytes = min(wanted_bytes // share, free_device_bytes(device) // (6 * share)) // MIB * MIB
    if buffer_bytes <= 0:
        raise InputError(f"too little free memory on {device} to measure anything; end what else runs there")
    adam_numel = min(max(plan.adam_numel, cold_bytes // 16) // share, 3 * buffer_bytes // 16)
    return dataclasses.replace(plan, buffer_bytes=buffer_bytes, adam_numel=adam_numel, cold_bytes=cold_bytes // share)


def median_seconds(
    run: Callable[[], object], device: torch.device, plan: Effort, ranks: Ranks | None = None
) -> tuple[float, int]:
    """Returns the median seconds of one `run()` on `device`, and the number of runs. One run before that is not
    counted: it pays for page faults, compilation and library start-up. With several ranks a run takes as long as on the
    slowest of them."""
    if device.type != "cuda":
        (seconds,), repeats = repeat(lambda: (_clock_seconds(run),), plan, ranks)
        return seconds, repeats
    # What ranks do together they do equally often, and begin together, which held devices would not.
    alone = ranks is None or ranks.size == 1
    queued = queued_runs(run, device) if alone else 1
    (seconds,), repeats = repeat(lambda: (_event_seconds(run, device, queued, held=alone),), plan, ranks)
    return seconds, repeats * queued


def repeat(
    once: Callable[[], tuple[float, ...]], plan: Effort, ranks: Ranks | None = None
) -> tuple[tuple[float, ...], int]:
    """Returns medians of the seconds that `once` gives, and the number of runs; all ranks start each run together."""
    together = ranks or Ranks()
    once()
    runs: list[tuple[float, ...]] = []
    began = time.perf_counter()
    while len(runs) < plan.max_repeats:
        # All ranks must stop after the same run, or one would wait for the others for ever.
        if len(runs) >= plan.min_repeats and together.slowest(time.perf_counter() - began) > plan.budget_s:
            break
        together.barrier()
        runs.append(tuple(together.slowest(seconds) for seconds in once()))
    return tuple(max(statistics.median(column), _MIN_S) for column in zip(*runs, strict=True)), len(runs)


def _clock_seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def queued_runs(run: Callable[[], object], device: torch.device) -> int:
    """How many runs are timed together: about `QUEUED_S` of them, as far as the host submits them while it may."""
    run()
    one_s = _event_seconds(run, device, 1, held=True)
    torch.cuda.synchronize(device)
    submitted_s = _clock_seconds(run)
    fitting = min(QUEUED_S / max(one_s, _MIN_S), SUBMITTED_S / max(submitted_s, _MIN_S))
    return max(1, min(int(fitting), MOST_QUEUED))


def _event_seconds(run: Callable[[], object], device: torch.device, queued: int, *, held: bool) -> float:
    """Seconds of one of `queued` runs, by events on the current stream.

    With `held` the device is held until the host has submitted them: in a step it has work in its queue, too, and an
    operator starts when the one before it ends.
    """
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


def check_device(device: torch.device | str) -> torch.device:
    """`device` as a `torch.device` with an index; `InputError` where this machine has none such."""
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"{device!r} is no device; write 'cuda:0' or 'cpu'") from None
    if target.type == "cpu":
        return target
    if target.type != "cuda":
        raise InputError(f"measurements run on cuda and cpu devices, not on {target.type!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if target.index is None else target.index
    if index >= count:
        raise InputError(f"no device cuda:{index}; PyTorch sees {count} CUDA devices here")
    return torch.device("cuda", index)


def default_device(ranks: Ranks) -> torch.device:
    """Each rank's own CUDA device, or the CPU on a machine without one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return check_device(f"cuda:{ranks.local_rank}")


def threads_text(count: int | None = None) -> str:
    """How many threads torch uses for one operator; a host rate means little without it."""
    count = torch.get_num_threads() if count is None else count
    return f"{count} thread" + ("s" if count != 1 else "")


def today() -> str:
    """ISO date, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
