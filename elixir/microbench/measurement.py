"""One measured rate, how it is timed, and how it is shown."""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elixir.errors import InputError
from elixir.free_memory import free_device_bytes
from elixir.units import MIB

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Measurement:
    """A rate, with what a reader needs in order to believe it."""

    name: str
    value: float
    """In `unit`."""
    unit: str
    """``bytes/s``, ``elements/s`` or ``FLOP/s``."""
    repeats: int
    """`value` is from the median of as many timed runs."""
    how: str
    """What ran, on which sizes."""

    @property
    def source(self) -> str:
        """Text for `HardwareProfile.sources`."""
        return f"measured, median of {self.repeats}: {self.how}"


@dataclass(frozen=True)
class Effort:
    """How long to measure, and on how much memory."""

    min_repeats: int
    max_repeats: int
    budget_s: float
    """Stop repeating after this long, once `min_repeats` are done."""
    buffer_bytes: int
    """Of one buffer; at most three are alive at a time."""
    adam_numel: int
    """Elements of the Adam step, 16 bytes each."""
    matmul_s: float
    """Aim for matrix products that take at most about this long each."""


_EFFORTS = {
    # Host buffers keep the whole process within 1 GiB; device buffers are as large as a link needs to show its rate.
    ("cpu", False): Effort(5, 20, 1.0, 192 * MIB, 32 * 10**6, 0.25),
    ("cpu", True): Effort(3, 5, 0.1, 64 * MIB, 8 * 10**6, 0.03),
    ("cuda", False): Effort(5, 20, 1.0, 512 * MIB, 128 * 10**6, 0.05),
    ("cuda", True): Effort(3, 5, 0.1, 128 * MIB, 32 * 10**6, 0.01),
}


def effort(device: torch.device, quick: bool) -> Effort:
    """What to spend on a measurement of `device`, never more than half of the memory that is free there.

    `quick` uses small buffers, so a large cache shows as too much bandwidth.
    """
    plan = _EFFORTS[device.type, quick]
    buffer_bytes = min(plan.buffer_bytes, free_device_bytes(device) // 6 // MIB * MIB)
    if buffer_bytes <= 0:
        raise InputError(f"too little free memory on {device} to measure anything; end what else runs there")
    adam_numel = min(plan.adam_numel, 3 * buffer_bytes // 16)
    return dataclasses.replace(plan, buffer_bytes=buffer_bytes, adam_numel=adam_numel)


def median_seconds(run: Callable[[], object], device: torch.device, plan: Effort) -> tuple[float, int]:
    """Median seconds of one `run()` on `device`, and of how many. One run before that is not counted: it pays for page
    faults, compilation and library start-up."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < plan.max_repeats:
        if len(seconds) >= plan.min_repeats and time.perf_counter() - began > plan.budget_s:
            break
        seconds.append(_event_seconds(run, device) if device.type == "cuda" else _clock_seconds(run))
    # A clock too coarse for the work would otherwise give an infinite rate.
    return max(statistics.median(seconds), 1e-9), len(seconds)


def _clock_seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _event_seconds(run: Callable[[], object], device: torch.device) -> float:
    """By events on the current stream, so that the host's launch overhead is not counted."""
    with torch.cuda.device(device):
        cuda: Any = torch.cuda  # its classes carry no annotations
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


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


def threads_text() -> str:
    """How many threads torch uses for one operator; a host rate means little without it."""
    count = torch.get_num_threads()
    return f"{count} thread" + ("s" if count != 1 else "")


def as_table(measurements: Sequence[Measurement]) -> str:
    """Lines for people: name, rate, repeats, what ran."""
    rows = [(m.name, format_rate(m.value, m.unit), f"median of {m.repeats}", m.how) for m in measurements]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {rate:>{widths[1]}}  {repeats:<{widths[2]}}  {how}" for name, rate, repeats, how in rows
    )


def format_rate(value: float, unit: str) -> str:
    """``1.5e9, bytes/s`` -> ``1.50 Gbytes/s``; decimal prefixes, as links are sold."""
    for scale, prefix in _SCALES:
        if value >= scale:
            return f"{value / scale:.2f} {prefix}{unit}"
    return f"{value:.2f} {unit}"


def as_json(measurements: Sequence[Measurement]) -> str:
    """JSON text with the measurements, the date and what ran them."""
    record = {
        "measured_at": today(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def today() -> str:
    """ISO date, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
