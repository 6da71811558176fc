"""The trace of a step some of whose units have activations on the host between forward and backward.

It follows from the trace without that, as `kept_trace` does: the bytes are gone from the end of the unit, or of the one
after it, until the backward of the one after it begins. The trace of the choice itself has the exact bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from elixir.access.swapping import SMALLEST_BYTES
from elixir.search.problem.kept_trace import runs_of_calls, saving_calls
from elixir.search.problem.packing import Ints
from elixir.step_trace import INPUT, SAVED, Result, StepTrace, Transfer, UnitActivations, UnitOperator, UnitRun

WHOLE = (Result(SAVED, 0),)
FIRST_INPUT = (Result(INPUT, 0),)


class SwappableStep:
    """Bytes that units of a step could move.

    Args:
        whole: the trace of the step, whose units keep everything and can run again, or keep nothing.
    """

    def __init__(self, whole: StepTrace) -> None:
        names = [unit.name for unit in whole.units]
        compiled = whole.step.compiled  # where nothing says when a unit is over, or one after it
        self._forwards = {name: forward for forward in whole.forwards for name in forward.units if name not in compiled}
        self.calls = saving_calls(whole)
        """The calls of each unit that keep anything for backward."""
        runs = {name: calls[0][0] for name, calls in runs_of_calls(whole, self.calls).items() if calls}
        self.following = {
            name: after
            for name, after in pairwise(names)
            if after in runs and after not in compiled and len(self.calls[name]) == len(self.calls[after])
        }
        """The unit that runs after each, as often."""
        left: dict[str, int] = {}
        """Bytes that a call of a unit leaves and does not save: what the one after it gets."""
        for name, after in self.following.items():
            if name in runs and (name in self._forwards or name in whole.step.checkpointed):
                begin, end = (whole.accesses[runs[each].first].kept_bytes for each in (name, after))
                forward = self._forwards.get(name)
                saved = 0 if forward is None else sum(each.saved_bytes for each in forward.operators)
                left[name] = max(end - begin - saved, 0)
        before = {after: name for name, after in self.following.items() if name in left}
        self._input_bytes = {name: min(left[each] for each in (before.get(name, name), name)) for name in left}
        """Bytes of the tensor that a call of a unit gets from the one before it. It leaves one as large: what else lies
        between two units, such as all that a decoder gets at first, is no input of one."""
        self.input_bytes = {name: each * len(self.calls[name]) for name, each in self._input_bytes.items()}
        """Bytes of these, of all calls that keep anything."""
        self.between = tuple(name for name in left if name in before and left[before[name]] == left[name])
        """Units that get from the one before it as much as they leave, and nothing else."""

    def able(self, name: str) -> bool:
        """Whether a unit can move anything: another one runs after it."""
        return self._input_bytes.get(name, 0) >= SMALLEST_BYTES

    def saved_bytes(self, name: str) -> int:
        """Bytes that a unit which keeps everything saves in all calls, its input and what is too small to move left
        out."""
        return sum(each.saved_bytes for each in self._moved(name)) * len(self.calls[name])

    def _moved(self, name: str) -> list[UnitOperator]:
        return [each for each in self._forwards[name].operators if each.saved_bytes >= SMALLEST_BYTES]

    def nbytes(self, each: UnitActivations) -> int:
        """Bytes that a unit moves."""
        rest = self.saved_bytes(each.unit) if each.swap == WHOLE else 0
        return self.input_bytes[each.unit] + rest if each.swap else 0

    def pieces(self, each: UnitActivations) -> dict[int, int]:
        """Bytes that a call of a unit sends, by its access in forward during which they are made."""
        found = {0: self._input_bytes[each.unit]}
        for operator in self._moved(each.unit) if each.swap == WHOLE else ():
            found[operator.access] = found.get(operator.access, 0) + operator.saved_bytes
        return found


def movable_inputs(trace: StepTrace) -> tuple[str, ...]:
    """The units that keep nothing and could move their input, in order; without the first of a stack, whose input a
    model may hold for as long as its forward runs."""
    step = SwappableStep(trace)
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
    return swapped_trace(replace(trace, step=step), SwappableStep(trace))


def swapped_trace(trace: StepTrace, step: SwappableStep) -> StepTrace:
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
