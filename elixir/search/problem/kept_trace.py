"""The trace of a step whose units keep some results of their forward and make the others again in backward.

It follows from the trace of the same step that keeps everything, so that memory and seconds of a choice are known
without tracing it. Bytes inside of a unit that runs are those of one that keeps everything, which is a little too much;
the trace of the choice itself has the exact ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elixir.errors import InputError
from elixir.search.problem.packing import Ints
from elixir.step_trace import Access, Result, StepTrace, UnitActivations, UnitForward, UnitRun


@dataclass(frozen=True)
class _Again:
    """A call of a unit that runs again before its backward."""

    forward: UnitForward
    keep: frozenset[Result]
    first: int
    """The first access of its forward."""
    last: int
    backward: int
    """The first access of its backward."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the results that it keeps."""
        return kept_bytes(self.forward, self.keep)

    @property
    def freed_bytes(self) -> int:
        """Bytes that it no longer holds from forward to backward."""
        return sum(each.saved_bytes for each in self.forward.operators) - self.kept_bytes


def kept_bytes(forward: UnitForward, keep: frozenset[Result]) -> int:
    """Bytes of the results that a unit with this forward keeps."""
    return sum(each.made_bytes for each in forward.operators if Result(each.operator, each.occurrence) in keep)


def saving_calls(trace: StepTrace) -> dict[str, list[tuple[int, int]]]:
    """The calls of each unit that keep anything for backward: the number of its run in forward, and of its backward.

    A unit may run more often in forward than in backward, such as once more under `torch.no_grad`, where it keeps
    nothing: the calls that keep most are those with a backward. Autograd works on the latest of them first.

    Args:
        trace: a step whose units keep everything, or what their own checkpoints leave.
    """
    found, runs = dict[str, list[tuple[int, int]]](), _runs(trace)
    for unit in trace.units:
        forwards, backwards = runs[unit.name]
        grown = {
            number: trace.accesses[min(run.last + 1, len(trace.accesses) - 1)].kept_bytes
            - trace.accesses[run.first].kept_bytes
            for number, run in enumerate(forwards)
            if len(forwards) > len(backwards) and unit.form != "checkpointed"
        }
        most = sorted(range(len(forwards)), key=lambda number: (grown.get(number, 0), number))[-len(backwards) :]
        waiting, pairs = sorted(most if backwards else []), []
        for number, backward in enumerate(backwards):
            earlier = [call for call in waiting if forwards[call].last < backward.first]
            if earlier:
                waiting.remove(earlier[-1])
                pairs.append((earlier[-1], number))
        found[unit.name] = sorted(pairs)
    return found


def runs_of_calls(
    trace: StepTrace, calls: Mapping[str, Sequence[tuple[int, int]]]
) -> dict[str, list[tuple[UnitRun, UnitRun]]]:
    """The runs in forward and where backward begins of each unit's calls, which may keep less than in the trace from
    which `saving_calls` are."""
    runs = _runs(trace)
    return {
        unit: [(runs[unit][0][forward], runs[unit][1][backward]) for forward, backward in pairs]
        for unit, pairs in calls.items()
    }


def _runs(trace: StepTrace) -> dict[str, tuple[list[UnitRun], list[UnitRun]]]:
    """The runs of each unit in forward, and where each of its backwards begins, with a recomputation if it has one."""
    found: dict[str, tuple[list[UnitRun], list[UnitRun]]] = {unit.name: ([], []) for unit in trace.units}
    latest: dict[int, UnitRun] = {}
    for run in trace.unit_runs:
        forwards, backwards = found[trace.units[run.unit].name]
        if run.phase == "forward":
            forwards.append(run)
        elif run.phase == "recompute" or run.unit not in latest or latest[run.unit].phase != "recompute":
            backwards.append(run)
        latest[run.unit] = run
    return found


def kept_trace(trace: StepTrace, activations: Sequence[UnitActivations]) -> StepTrace:
    """The step with these activations; peaks and the curve of the trace stay those of the step that keeps everything.

    Args:
        trace: keeps everything.
        activations: of units with a forward (`StepTrace.forwards`).

    Raises:
        InputError: the trace has no forward of one of them.
    """
    again = _again(trace, activations)
    if not again:
        return replace(trace, step=replace(trace.step, activations=tuple(activations)))
    count = len(trace.accesses)
    change: Ints = np.zeros(count + 1, dtype=np.int64)
    inserted: Ints = np.zeros(count + 1, dtype=np.int64)
    for each in again:
        change[each.last + 1] += each.freed_bytes
        change[each.backward] -= each.freed_bytes
        inserted[each.backward] += each.forward.accesses_again
    freed = np.cumsum(change[:count]).tolist()
    shift = np.cumsum(inserted[:count])
    at = (np.arange(count) + shift).tolist()
    before = {each.backward: each for each in again}
    accesses: list[Access] = []
    for index, access in enumerate(trace.accesses):
        if index in before:
            unit = before[index]
            accesses += _made_again(trace, unit, len(accesses), access.kept_bytes - freed[index] - unit.freed_bytes)
        accesses.append(
            Access(  # much faster than to replace some fields
                access.phase,
                access.parameters,
                at[access.pin_until],
                access.module,
                access.operator,
                access.operations,
                access.live_bytes - freed[index],
                access.kept_bytes - freed[index],
                access.parts,
                access.arriving_bytes,
            )
        )
    names = {each.unit for each in activations if each.keep is not None}
    units = tuple(
        replace(unit, form="checkpointed") if unit.name in names and unit.form == "plain" else unit
        for unit in trace.units
    )
    return replace(
        trace,
        accesses=tuple(accesses),
        parameters=tuple(
            info if info.grad_access is None else replace(info, grad_access=at[info.grad_access])
            for info in trace.parameters
        ),
        transfers=tuple(replace(each, begins=at[each.begins], ends=at[each.ends]) for each in trace.transfers),
        forwards=(),
        step=replace(trace.step, activations=tuple(activations), units=units),
    )


def _again(trace: StepTrace, activations: Sequence[UnitActivations]) -> list[_Again]:
    forwards = {name: forward for forward in trace.forwards for name in forward.units}
    calls = runs_of_calls(trace, saving_calls(trace))
    found = []
    for each in activations:
        if each.keep is None:
            continue
        if each.unit not in forwards or not calls.get(each.unit):
            raise InputError(f"the trace does not say what {each.unit!r} makes in forward; trace the model again")
        unit, keep = forwards[each.unit], frozenset(each.keep)
        found += [_Again(unit, keep, call.first, call.last, back.first) for call, back in calls[each.unit]]
    return found


def _made_again(trace: StepTrace, unit: _Again, position: int, kept: int) -> list[Access]:
    """The accesses with which a unit runs again.

    Args:
        trace: keeps everything.
        unit: runs again.
        position: of the first of them.
        kept: bytes that are there when it begins, its kept results included.
    """
    count = unit.forward.accesses_again
    operations: list[list[int]] = [[] for _ in range(count)]
    later = [0] * count  # bytes of kept results that an access finds, while the forward makes them after it
    for number, each in enumerate(unit.forward.operators):
        if Result(each.operator, each.occurrence) in unit.keep:
            for access in range(min(each.access, count)):
                later[access] += each.made_bytes
        elif number < unit.forward.again and each.operation is not None:
            operations[min(each.access, count - 1)].append(each.operation)
    accesses = trace.accesses[unit.first : unit.first + count]
    begun = accesses[0].kept_bytes
    rest = kept - unit.kept_bytes
    return [
        replace(
            access,
            phase="recompute",
            pin_until=position + min(access.pin_until - unit.first, count - 1),
            operations=tuple(operations[number]),
            live_bytes=max(rest + access.live_bytes - begun + later[number], kept),
            kept_bytes=max(rest + access.kept_bytes - begun + later[number], kept),
        )
        for number, access in enumerate(accesses)
    ]
