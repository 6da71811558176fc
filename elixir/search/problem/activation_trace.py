"""Traces of a step whose units keep some results of their forward, make others again, or move them to the host.

They follow from the trace of the same step that keeps everything, so that memory and seconds of a choice are known
without tracing it. Bytes inside of a unit that runs are those of one that keeps everything, which is a little too much;
what moves is gone from the end of the unit, or of the one after it, until the backward of the one after it begins. The
trace of the choice itself has the exact bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from elixir.access.activations import SMALLEST_BYTES
from elixir.errors import InputError
from elixir.search.problem.placement import Ints
from elixir.step_trace import (
    INPUT,
    SAVED,
    Access,
    Result,
    StepTrace,
    Transfer,
    UnitActivations,
    UnitForward,
    UnitOperator,
    UnitRun,
)

WHOLE = (Result(SAVED, 0),)
FIRST_INPUT = (Result(INPUT, 0),)


class _Rerun:
    """A forward that runs again, some of its results kept: the same for all units with this forward.

    Attributes:
        kept_bytes: of the results that are kept.
        freed_bytes: that are no longer held from forward to backward.
        operations: by access that runs again, its operators.
        later: by access that runs again, the bytes of kept results that it finds and the forward makes after it.
    """

    def __init__(self, forward: UnitForward, keep: frozenset[Result]) -> None:
        count = forward.accesses_again
        operations: list[list[int]] = [[] for _ in range(count)]
        self.later = [0] * count
        self.kept_bytes = kept_bytes(forward, keep)
        for number, each in enumerate(forward.operators):
            if Result(each.operator, each.occurrence) in keep:
                for access in range(min(each.access, count)):
                    self.later[access] += each.made_bytes
            elif number < forward.again and each.operation is not None:
                operations[min(each.access, count - 1)].append(each.operation)
        self.operations = list(map(tuple, operations))
        self.freed_bytes = sum(each.saved_bytes for each in forward.operators) - self.kept_bytes


class _Again(NamedTuple):
    """A call of a unit that runs again before its backward."""

    rerun: _Rerun
    first: int
    """The first access of its forward."""
    last: int
    backward: int
    """The first access of its backward."""
    freed_bytes: int
    """Bytes that it no longer holds from forward to backward, less those of its input, if only now it is held."""


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


def kept_trace(trace: StepTrace, activations: Sequence[UnitActivations], step: StepUnits | None = None) -> StepTrace:
    """The step with these activations; peaks and the curve of the trace stay those of the step that keeps everything.

    Args:
        trace: keeps everything.
        activations: of units with a forward (`StepTrace.forwards`).
        step: the units of the trace, where they are known.

    Raises:
        InputError: the trace has no forward of one of them.
    """
    again = _again(activations, step or StepUnits(trace))
    if not again:
        return replace(trace, step=replace(trace.step, activations=tuple(activations)))
    count = len(trace.accesses)
    change: Ints = np.zeros(count + 1, dtype=np.int64)
    inserted: Ints = np.zeros(count + 1, dtype=np.int64)
    for each in again:
        change[each.last + 1] += each.freed_bytes
        change[each.backward] -= each.freed_bytes
        inserted[each.backward] += len(each.rerun.later)
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


def _again(activations: Sequence[UnitActivations], step: StepUnits) -> list[_Again]:
    found, reruns = list[_Again](), dict[tuple[int, tuple[Result, ...]], _Rerun]()
    for each in activations:
        if each.keep is None:
            continue
        if each.unit not in step.forwards or not step.runs.get(each.unit):
            raise InputError(f"the trace does not say what {each.unit!r} makes in forward; trace the model again")
        forward = step.forwards[each.unit]
        rerun = reruns.get((id(forward), each.keep)) or _Rerun(forward, frozenset(each.keep))
        reruns[id(forward), each.keep] = rerun
        freed_bytes = rerun.freed_bytes - step.dropped_bytes.get(each.unit, 0)
        runs = step.runs[each.unit]
        found += [_Again(rerun, call.first, call.last, back.first, freed_bytes) for call, back in runs]
    return found


def _made_again(trace: StepTrace, unit: _Again, position: int, kept: int) -> list[Access]:
    """The accesses with which a unit runs again.

    Args:
        trace: keeps everything.
        unit: runs again.
        position: of the first of them.
        kept: bytes that are there when it begins, its kept results included.
    """
    rerun, last = unit.rerun, len(unit.rerun.later) - 1
    accesses = trace.accesses[unit.first : unit.first + last + 1]
    rest = kept - rerun.kept_bytes - accesses[0].kept_bytes
    return [
        Access(  # as above
            "recompute",
            access.parameters,
            position + min(access.pin_until - unit.first, last),
            access.module,
            access.operator,
            operations,
            max(rest + access.live_bytes + later, kept),
            max(rest + access.kept_bytes + later, kept),
            access.parts,
            access.arriving_bytes,
        )
        for access, operations, later in zip(accesses, rerun.operations, rerun.later, strict=True)
    ]


class StepUnits:
    """Calls of a step's units, and bytes that they get, keep and could move.

    Args:
        whole: the trace of the step, whose units keep everything and can run again, or keep nothing.
    """

    def __init__(self, whole: StepTrace) -> None:
        names = [unit.name for unit in whole.units]
        compiled = whole.step.compiled  # where nothing says when a unit is over, or one after it
        self.forwards = {name: forward for forward in whole.forwards for name in forward.units}
        """The forward of each unit that can run again."""
        self.calls = saving_calls(whole)
        """The calls of each unit that keep anything for backward."""
        self.runs = runs_of_calls(whole, self.calls)
        """The runs of these calls in forward, and the first ones of their backwards."""
        self.following = {
            name: after
            for name, after in pairwise(names)
            if self.runs[after]
            and not {name, after}.intersection(compiled)
            and len(self.calls[name]) == len(self.calls[after])
        }
        """The unit that runs after each, as often."""
        left: dict[str, int] = {}
        """Bytes that a call of a unit leaves and does not save: what the one after it gets."""
        for name, after in self.following.items():
            if self.runs[name] and (name in self.forwards or name in whole.step.checkpointed):
                begin, end = (whole.accesses[self.runs[each][0][0].first].kept_bytes for each in (name, after))
                left[name] = max(end - begin - (self._saved(name) if name in self.forwards else 0), 0)
        self.dropped_bytes: dict[str, int] = {}
        """Bytes of the input that a call of a unit holds if it runs again: nothing else may hold it in backward."""
        for forward in whole.forwards:
            # Nothing is left if what a unit returns takes the place of what it got. It makes that last.
            if not min((left[name] for name in forward.units if name in left), default=1):
                returned = (it.made_bytes - it.saved_bytes for it in reversed(forward.operators) if it.made_bytes)
                self.dropped_bytes |= dict.fromkeys(forward.units, next(returned, 0))
        before = {after: name for name, after in self.following.items() if name in left}
        self._input_bytes = {name: min(left[each] for each in (before.get(name, name), name)) for name in left}
        """Bytes of the tensor that a call of a unit gets from the one before it. It leaves one as large: what else lies
        between two units, such as all that a decoder gets at first, is no input of one."""
        self.input_bytes = {name: each * len(self.calls[name]) for name, each in self._input_bytes.items()}
        """Bytes of these, of all calls that keep anything."""
        self.between = tuple(name for name in left if name in before and left[before[name]] == left[name])
        """Units that get from the one before it as much as they leave, and nothing else."""

    def _saved(self, name: str) -> int:
        return sum(each.saved_bytes for each in self.forwards[name].operators)

    def able(self, name: str) -> bool:
        """Whether a unit can move anything: another one runs after it."""
        return self._input_bytes.get(name, 0) >= SMALLEST_BYTES

    def saved_bytes(self, name: str) -> int:
        """Bytes that a unit which keeps everything saves in all calls, its input and what is too small to move left
        out."""
        return sum(each.saved_bytes for each in self._moved(name)) * len(self.calls[name])

    def _moved(self, name: str) -> list[UnitOperator]:
        return [each for each in self.forwards[name].operators if each.saved_bytes >= SMALLEST_BYTES]

    def nbytes(self, each: UnitActivations) -> int:
        """Bytes that a unit moves."""
        return sum(self.pieces(each).values()) * len(self.calls[each.unit]) if each.swap else 0

    def pieces(self, each: UnitActivations) -> dict[int, int]:
        """Bytes that a call of a unit sends, by its access in forward during which they are made."""
        found = {0: self._input_bytes[each.unit]}
        for operator in self._moved(each.unit) if each.swap == WHOLE else ():
            found[operator.access] = found.get(operator.access, 0) + operator.saved_bytes
        return found


def movable_inputs(trace: StepTrace) -> tuple[str, ...]:
    """The units that keep nothing and could move their input, in order; without the first of a stack, whose input a
    model may hold for as long as its forward runs."""
    step = StepUnits(trace)
    return tuple(name for name in trace.step.checkpointed if step.able(name) and name in step.between)


def with_inputs_on_host(trace: StepTrace, units: Collection[str]) -> StepTrace:
    """The step in which some units that keep nothing move their input.

    Args:
        trace: of one micro-batch that moves nothing.
        units: some of `movable_inputs`.
    """
    moving = {name: UnitActivations(name, (), FIRST_INPUT) for name in units}
    activations = {each.unit: each for each in trace.step.activations} | moving
    step = replace(trace.step, activations=tuple(activations.values()))
    return swapped_trace(replace(trace, step=step), StepUnits(trace))


def swapped_trace(trace: StepTrace, step: StepUnits) -> StepTrace:
    """The step with what `StepShape.activations` moves to the host.

    Args:
        trace: as `kept_trace` gives it.
        step: what units could move.
    """
    activations = [replace(each, swap_bytes=step.nbytes(each)) for each in trace.step.activations]
    moving = [each for each in activations if each.swap]
    if not moving:
        return trace
    calls = runs_of_calls(trace, step.calls)
    count = len(trace.accesses)
    change: Ints = np.zeros(count + 1, dtype=np.int64)
    transfers: list[Transfer] = []
    for each in moving:
        pieces = step.pieces(each)
        for call, next_call in zip(calls[each.unit], calls[step.following[each.unit]], strict=True):
            gone = (next_call if each.swap == WHOLE else call)[0].last + 1
            change[gone] += sum(pieces.values())
            change[next_call[1].first] -= sum(pieces.values())
            transfers += _transfers(trace, pieces, gone - 1, call, next_call)
    freed = np.cumsum(change[:count])
    before = np.maximum(freed, np.concatenate(([0], freed[:-1])))  # what comes back is not there when an access begins
    accesses = tuple(
        replace(access, live_bytes=access.live_bytes - less, kept_bytes=access.kept_bytes - of_kept)
        if of_kept
        else access
        for access, less, of_kept in zip(trace.accesses, freed.tolist(), before.tolist(), strict=True)
    )
    return replace(
        trace,
        accesses=accesses,
        transfers=(*trace.transfers, *transfers),
        step=replace(trace.step, activations=tuple(activations)),
    )


def _transfers(
    trace: StepTrace,
    pieces: Mapping[int, int],
    gone: int,
    call: tuple[UnitRun, UnitRun],
    next_call: tuple[UnitRun, UnitRun],
) -> list[Transfer]:
    """The copies of a unit's call, whose device memory is free after the access `gone`."""

    def end_of(access: int) -> int:
        return len(trace.accesses[access].operations)

    first = call[0].first
    found = [
        Transfer("device_to_host", nbytes, at, gone, True, end_of(at) if access else 0, end_of(gone))
        for access, nbytes in sorted(pieces.items())
        for at in [min(first + access, gone)]
    ]
    begins, ends = next_call[1].first, call[1].first
    return [*found, Transfer("host_to_device", sum(pieces.values()), begins, ends, planned=True)]
