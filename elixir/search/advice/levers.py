"""Levers of a plan: the same step planned with one thing changed, and the best of what is
allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from elixir.errors import InputError, PlanError, TraceError
from elixir.hardware import HardwareProfile
from elixir.plan import Plan
from elixir.search.advice.changes import Change, Kind, job_changes, more_batches
from elixir.search.advice.what_suffices import Tries
from elixir.search.request import SearchRequest
from elixir.step_trace import StepTrace

ALLOWED: tuple[Kind, ...] = ("moments", "kernels", "accumulation", "checkpointing")
"""Kinds of changes that a user may allow: they change numerics, or what a step is."""


@dataclass(frozen=True)
class PlanLever:
    """One change and the plan that it gives."""

    action: str
    options: tuple[tuple[str, str], ...]
    """Arguments that do it, with their values; a switch has none."""
    plan: Plan | None
    """None where nothing fits with it."""
    gain: float | None
    """Samples a second over those of the plan as it is."""


def plan_levers(
    plan: Plan, trace: StepTrace, hardware: HardwareProfile, request: SearchRequest, tries: Tries
) -> tuple[PlanLever, ...]:
    """Every change of the training, planned; the most samples a second first, and last what does not fit.

    Args:
        plan: made from `trace` for `request`.
        trace: the step.
        hardware: the machine.
        request: as asked.
        tries: plans with each change.
    """
    now = samples_per_s(plan)
    rows = []
    for change in _changes(trace, request):
        # As a user's own search would: a row promises what planning with the change then gives.
        found = _planned(change, trace, hardware, request, tries, briefly=False)
        gain = None if found is None else samples_per_s(found[0]) / now
        rows.append(PlanLever(change.action, change.options, None if found is None else found[0], gain))
    return tuple(sorted(rows, key=lambda row: (row.gain is None, -(row.gain or 0.0), row.action)))


def best_allowed(
    trace: StepTrace, hardware: HardwareProfile, request: SearchRequest, kinds: Collection[str], tries: Tries
) -> tuple[StepTrace, SearchRequest, tuple[Change, ...]]:
    """The step and the question with the allowed changes that give most samples a second, chosen one after the other.

    Args:
        kinds: of `ALLOWED`.

    Raises:
        InputError: a kind is unknown.
    """
    unknown = [kind for kind in kinds if kind not in ALLOWED]
    if unknown:
        raise InputError(f"{unknown[0]!r} cannot be allowed; expected some of {', '.join(ALLOWED)}")
    taken: list[Change] = []
    plan = tries.plan(trace, request, briefly=True)
    speed = 0.0 if plan is None else samples_per_s(plan)
    for kind in ALLOWED:
        best: tuple[float, Change, StepTrace, SearchRequest] | None = None
        for change in _changes(trace, request) if kind in kinds else ():
            one = change.kinds == (kind,)
            found = _planned(change, trace, hardware, request, tries, briefly=True) if one else None
            if found is not None and samples_per_s(found[0]) > (speed if best is None else best[0]):
                best = samples_per_s(found[0]), change, found[1], found[2]
        if best is not None:
            speed, change, trace, request = best
            taken.append(change)
    return trace, request, tuple(taken)


def samples_per_s(plan: Plan) -> float:
    """Samples of all ranks together; micro-batches where samples are not known."""
    return (plan.step.samples or 1) * plan.accumulation * plan.world_size / plan.predicted.step_s


def _changes(trace: StepTrace, request: SearchRequest) -> Iterator[Change]:
    yield from job_changes(trace, request)
    yield from more_batches(request)


def _planned(
    change: Change, trace: StepTrace, hardware: HardwareProfile, request: SearchRequest, tries: Tries, *, briefly: bool
) -> tuple[Plan, StepTrace, SearchRequest] | None:
    try:
        other, asked = change.applied(trace, hardware, request)
        plan = tries.plan(other, asked, briefly=briefly)
    except (InputError, PlanError, TraceError):
        return None
    return None if plan is None else (plan, other, asked)
