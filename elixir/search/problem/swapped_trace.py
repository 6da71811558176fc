"""The trace of a step some of whose units have activations on the host between forward and backward.

It follows from the trace without that, as `kept_trace` does: the bytes are gone from the end of the unit, or of the one
after it, until the backward of the one after it begins. The trace of the choice itself has the exact bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from elixir.access.swapping import SMALLEST_BYTES
from elixir.search.problem.packing import Ints
from elixir.step_trace import INPUT, SAVED, Result, StepTrace, Transfer, UnitActivations, UnitOperator, UnitRun

WHOLE = (Result(SAVED, 0),)
FIRST_INPUT = (Result(INPUT, 0),)


class SwappableStep:
    """Bytes that units of a step could move.

    Args:
        whole: the trace of the step that keeps everything, whose units can run again.
    """

    def __init__(self, whole: StepTrace) -> None:
        names = [unit.name for unit in whole.units]
        self._forwards = {name: forward for forward in whole.forwards for name in forward.units}
        runs = {names[run.unit]: run for run in reversed(whole.unit_runs) if run.phase == "forward"}
        self.following = {name: after for name, after in pairwise(names) if after in runs}
        """The unit that runs after each."""
        self.input_bytes: dict[str, int] = {}
        """Bytes of the tensor that a unit gets from the one before it: what that leaves and does not save."""
        for name, after in self.following.items():
            if name in self._forwards and name in runs:
                begin, end = (whole.accesses[runs[each].first].kept_bytes for each in (name, after))
                saved = sum(each.saved_bytes for each in self._forwards[name].operators)
                self.input_bytes[after] = max(end - begin - saved, 0)
        # The first one's comes from elsewhere, and is as large as those of others.
        first = next(iter(self.following), "")
        self.input_bytes.setdefault(first, self.input_bytes.get(self.following.get(first, ""), 0))

    def able(self, name: str) -> bool:
        """Whether a unit can move anything: another one runs after it."""
        return name in self._forwards and name in self.following and self.input_bytes.get(name, 0) >= SMALLEST_BYTES

    def saved_bytes(self, name: str) -> int:
        """Bytes that a unit which keeps everything saves, its input and what is too small to move left out."""
        return sum(each.saved_bytes for each in self._moved(name))

    def _moved(self, name: str) -> list[UnitOperator]:
        return [each for each in self._forwards[name].operators if each.saved_bytes >= SMALLEST_BYTES]

    def nbytes(self, each: UnitActivations) -> int:
        """Bytes that a unit moves."""
        rest = self.saved_bytes(each.unit) if each.swap == WHOLE else 0
        return self.input_bytes[each.unit] + rest if each.swap else 0

    def pieces(self, each: UnitActivations) -> dict[int, int]:
        """Bytes that a unit sends, by its access in forward during which they are made."""
        found = {0: self.input_bytes[each.unit]}
        for operator in self._moved(each.unit) if each.swap == WHOLE else ():
            found[operator.access] = found.get(operator.access, 0) + operator.saved_bytes
        return found


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
    names = [unit.name for unit in trace.units]
    forward = {names[run.unit]: run for run in reversed(trace.unit_runs) if run.phase == "forward"}
    backward = {names[run.unit]: run for run in reversed(trace.unit_runs) if run.phase != "forward"}
    count = len(trace.accesses)
    change: Ints = np.zeros(count + 1, dtype=np.int64)
    transfers: list[Transfer] = []
    for each in moving:
        after = step.following[each.unit]
        gone = (forward[after] if each.swap == WHOLE else forward[each.unit]).last + 1
        change[gone] += each.swap_bytes
        change[backward[after].first] -= each.swap_bytes
        transfers += _transfers(trace, each, step, gone - 1, forward, backward)
    freed = np.cumsum(change[:count]).tolist()
    accesses = tuple(
        replace(access, live_bytes=access.live_bytes - less, kept_bytes=access.kept_bytes - less) if less else access
        for access, less in zip(trace.accesses, freed, strict=True)
    )
    return replace(
        trace,
        accesses=accesses,
        transfers=(*trace.transfers, *transfers),
        step=replace(trace.step, activations=tuple(activations)),
    )


def _transfers(
    trace: StepTrace,
    each: UnitActivations,
    step: SwappableStep,
    gone: int,
    forward: Mapping[str, UnitRun],
    backward: Mapping[str, UnitRun],
) -> list[Transfer]:
    """The copies of a unit, whose device memory is free after the access `gone`."""
    after = step.following[each.unit]

    def end_of(access: int) -> int:
        return len(trace.accesses[access].operations)

    first = forward[each.unit].first
    found = [
        Transfer("device_to_host", nbytes, at, gone, True, end_of(at) if access else 0, end_of(gone))
        for access, nbytes in sorted(step.pieces(each).items())
        for at in [min(first + access, gone)]
    ]
    begins, ends = backward[after].first, backward[each.unit].first
    return [*found, Transfer("host_to_device", each.swap_bytes, begins, ends, planned=True)]
