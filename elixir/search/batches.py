"""How to cut a step's samples into batches, and whether to checkpoint: every way is traced, planned, and compared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elixir.errors import InputError, InputTypeError, PlanError
from elixir.hardware import HardwareProfile
from elixir.plan import Plan
from elixir.search.planner import plan_from_trace
from elixir.search.rates import Rates, main_dtype
from elixir.tracer.step_trace import StepTrace

logger = logging.getLogger(__name__)

TraceOf = Callable[[int, str], StepTrace]
"""Traces a batch of so many samples with so much checkpointing, such as ``trace_of(4, "non-reentrant")``."""


@dataclass(frozen=True)
class BatchOption:
    """One way to run a step. What is not known is None."""

    batch: int
    """Samples of one rank that are computed at once."""
    accumulation: int
    """Batches per optimizer step."""
    checkpoint: str
    """What was given to the tracer."""
    reason: str = ""
    """Why it was not taken further, in one sentence; empty where there is a plan."""
    step_s: float | None = None
    """Of the optimizer step, all its batches together."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    """Of one machine."""


@dataclass(frozen=True)
class BatchChoice:
    """The fastest way, its plan, and what else there was."""

    plan: Plan
    option: BatchOption
    options: tuple[BatchOption, ...]
    """All of them, in the order in which they were tried."""


def search_batches(
    trace_of: TraceOf,
    hardware: HardwareProfile,
    world_size: int,
    *,
    samples: int,
    checkpoints: Sequence[str] = ("none",),
    micro_batches: bool = True,
    **options: Any,
) -> BatchChoice:
    """The fastest plan for `samples` samples of a rank per optimizer step.

    A step's samples are one batch, or 2, 4, 8, ... as long as they can be halved, whose gradients are added up. Of plans
    that take equally long the first is chosen: the one with fewer batches, then what comes first in `checkpoints`.

    Args:
        trace_of: called at most once per batch and entry of `checkpoints`.
        hardware: the machine.
        world_size: number of ranks.
        samples: of one rank, per optimizer step.
        checkpoints: forms of activation checkpointing to choose from, as `trace_of` knows them.
        micro_batches: False: one batch only.
        options: those of `plan_from_trace`, such as ``device_memory`` and ``host_memory``.

    Raises:
        InputError, InputTypeError: an argument makes no sense.
        PlanError: no way fits; of the one that was nearest.
    """
    _check(samples, checkpoints, options)
    tried: list[BatchOption] = []
    best: tuple[float, Plan, BatchOption] | None = None
    nearest: PlanError | None = None
    for batch, checkpoint in _ways(samples, checkpoints, micro_batches=micro_batches):
        option = BatchOption(batch, samples // batch, checkpoint)
        trace = trace_of(batch, checkpoint)
        least_s = option.accumulation * _compute_s(trace, hardware, world_size)
        if best is not None and least_s > best[0]:
            tried.append(replace(option, reason=f"compute alone takes {least_s:.4g} s, longer than another way's step"))
            continue
        try:
            plan = plan_from_trace(trace, hardware, world_size, accumulation=option.accumulation, **options)
        except PlanError as error:
            nearest = min((known for known in (nearest, error) if known is not None), key=_lacking)
            tried.append(replace(option, reason=str(error).splitlines()[0]))
            continue
        step_s, predicted = plan.predicted.seconds["total"], plan.predicted
        option = replace(
            option,
            step_s=step_s,
            device_peak_bytes=predicted.device_peak_bytes,
            host_peak_bytes=predicted.host_peak_bytes,
        )
        tried.append(option)
        logger.debug("%d x %d, checkpointing %s: %.4g s", option.accumulation, batch, checkpoint, step_s)
        if best is None or round(step_s, 9) < round(best[0], 9):
            best = (step_s, plan, option)
    if best is None:
        raise nearest or PlanError("no way to cut the batch was tried", needed_bytes=0, available_bytes=0)
    return BatchChoice(best[1], best[2], tuple(tried))


def _ways(samples: int, checkpoints: Sequence[str], *, micro_batches: bool) -> Iterator[tuple[int, str]]:
    """Batch and checkpointing, the largest batch first."""
    batch = samples
    while True:
        for checkpoint in checkpoints:
            yield batch, checkpoint
        if not micro_batches or batch % 2:
            return
        batch //= 2


def _compute_s(trace: StepTrace, hardware: HardwareProfile, world_size: int) -> float:
    """Compute of one batch; no plan of it is faster."""
    ranks = hardware.ranks_per_host(world_size)
    return float(Rates(hardware, main_dtype(trace), world_size, ranks).events_s(trace).sum())


def _lacking(error: PlanError) -> int:
    return error.needed_bytes - error.available_bytes


def _check(samples: object, checkpoints: object, options: dict[str, Any]) -> None:
    if isinstance(samples, bool) or not isinstance(samples, int):
        raise InputTypeError(f"samples must be a whole number, got {samples!r}")
    if samples < 1:
        raise InputError(f"samples must be 1 or larger, got {samples}")
    if isinstance(checkpoints, str) or not isinstance(checkpoints, Sequence) or not checkpoints:
        raise InputTypeError(
            f"checkpoints must be a list of forms such as ['none', 'non-reentrant'], got {checkpoints!r}"
        )
    if "accumulation" in options:
        raise InputError("accumulation follows from samples and the batch; leave it out")
