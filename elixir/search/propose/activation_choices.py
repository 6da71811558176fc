"""Fillings of the device with activations: what units keep for backward, most seconds a byte first, and what they move
to the host next to that."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from elixir.search.problem.activation_trace import (
    FIRST_INPUT,
    WHOLE,
    StepUnits,
    kept_bytes,
    kept_trace,
    swapped_trace,
)
from elixir.search.problem.placement import Floats
from elixir.search.simulator.rates import Rates
from elixir.step_trace import Result, StepTrace, UnitActivations, UnitForward

SHARES = 4
"""The search looks at so many numbers of units, up to what the host holds, and at none."""


class Choice(NamedTuple):
    """A choice of what a unit keeps, compared with the one that keeps least."""

    activations: UnitActivations
    """One unit's; without its name for a kind of units."""
    nbytes: int
    saved_s: float
    """Seconds that the unit is faster."""


@dataclass(frozen=True)
class KeptResults:
    """Fillings of one step: with each, one unit keeps more than with the one before.

    A unit that keeps nothing runs again as a whole; a compiled one keeps everything or nothing. Results whose operators
    take the most seconds a byte are kept first, in all units, and in the last units before the others.
    """

    trace: StepTrace
    """The trace of the step whose units keep everything."""
    rates: Rates
    """The rates of the machine."""

    @cached_property
    def units(self) -> StepUnits:
        """Its units."""
        return StepUnits(self.trace)

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of each of its operations."""
        return self.rates.operations_s(self.trace)

    @cached_property
    def changes(self) -> tuple[Choice, ...]:
        """The unit that keeps more with each filling and all that it keeps then, with the seconds that this saves over
        the filling before."""
        numbers = {unit.name: number for number, unit in enumerate(self.trace.units)}
        found = []
        for units, choices in self._ways:
            for rank, (less, more) in enumerate(pairwise(choices)):
                saved_s = more.saved_s - less.saved_s
                worth = saved_s / max(more.nbytes - less.nbytes, 1)
                found += [((-worth, rank, -numbers[unit]), _of(unit, more, saved_s)) for unit in units]
        return tuple(change for _, change in sorted(found, key=lambda each: each[0]))

    def activations(self, count: int) -> tuple[UnitActivations, ...]:
        """The filling with the first `count` changes."""
        kept = dict(self._least)
        for change in self.changes[:count]:
            kept[change.activations.unit] = change.activations
        return tuple(kept[unit.name] for unit in self.trace.units if unit.name in kept)

    def filled(self, count: int) -> StepTrace:
        """The step with that filling."""
        return kept_trace(self.trace, self.activations(count), self.units)

    @cached_property
    def _ways(self) -> list[tuple[list[str], list[Choice]]]:
        """Units that do the same, and their choices, least first."""
        whole = {unit.name for unit in self.trace.units if unit.fetch == "parameters" or unit.form == "compiled"}
        found = []
        for forward in self.trace.forwards:
            for some in (True, False):
                units = [unit for unit in forward.units if (unit not in whole) == some]
                if units:
                    found.append((units, list(_best(self._choices(forward, units[0], some=some)))))
        return found

    @cached_property
    def _least(self) -> dict[str, UnitActivations]:
        """The activations with which units keep least, of those that could keep more, or less than they do; or than
        they would in the run, where their activation checkpoints were taken away."""
        without = {each.unit for each in self.trace.step.activations}
        found: dict[str, UnitActivations] = {}
        for units, (least, *more) in self._ways:
            found |= {unit: _of(unit, least, 0.0).activations for unit in units if more or unit in without}
        return found

    def _choices(self, forward: UnitForward, unit: str, *, some: bool) -> Iterator[Choice]:
        """Nothing, more and more results unless `some` is false, and everything; in each call of such a unit."""
        calls, dropped_bytes = len(self.units.calls[unit]), self.units.dropped_bytes.get(unit, 0)
        yield Choice(UnitActivations("", ()), 0, 0.0)
        again = [
            (0.0 if each.operation is None else calls * float(self.seconds[each.operation]), each)
            for each in forward.operators[: forward.again]
        ]
        able = [(seconds, each) for seconds, each in again if each.keepable and seconds]
        keep: list[Result] = []
        saved_s = 0.0
        for seconds, each in sorted(able, key=lambda one: one[0] / one[1].made_bytes, reverse=True) if some else ():
            keep.append(Result(each.operator, each.occurrence))
            saved_s += seconds
            kept = calls * kept_bytes(forward, frozenset(keep))
            yield Choice(UnitActivations("", tuple(sorted(keep))), kept, saved_s)
        every = sum(each.saved_bytes for each in forward.operators) - dropped_bytes
        yield Choice(UnitActivations("", None), calls * max(every, 0), sum(seconds for seconds, _ in again))


def _of(unit: str, choice: Choice, saved_s: float) -> Choice:
    """A choice of one unit, with the seconds that it saves over another."""
    return Choice(replace(choice.activations, unit=unit), choice.nbytes, saved_s)


def _best(choices: Iterator[Choice]) -> Iterator[Choice]:
    """The choices that no mix of two others beats: seconds saved a byte fall from one to the next."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.nbytes, -each.saved_s)):
        if hull and choice.saved_s <= hull[-1].saved_s:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) < _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    yield from hull


def _slope(less: Choice, more: Choice) -> float:
    return (more.saved_s - less.saved_s) / max(more.nbytes - less.nbytes, 1)


@dataclass(frozen=True)
class Swaps:
    """Units by what they move, and the filling of all others (`KeptResults`)."""

    whole: int
    """Units that run once and move all that they save, spread over the model."""
    inputs: int
    """The first so many of those that run again move their input."""
    count: int
    step_s: float
    """Seconds that compute and the links take about, wherever chunks are."""


class SwappedUnits:
    """Ways to move activations of a step's units.

    Args:
        kept: fillings of the device.
        rates: of the machine.
    """

    def __init__(self, kept: KeptResults, rates: Rates) -> None:
        self._kept, self._rates = kept, rates
        self._step = kept.units
        self._able = [unit.name for unit in kept.trace.units if self._step.able(unit.name)]
        self._saving = {name for forward in kept.trace.forwards for name in forward.units}
        self._saving.difference_update(kept.trace.step.compiled)

    def activations(self, swaps: Swaps) -> tuple[UnitActivations, ...]:
        """The activations of each unit."""
        whole, inputs = self._spread(swaps.whole), swaps.inputs
        found = []
        for each in self._kept.activations(swaps.count):
            if each.unit in whole:
                found.append(UnitActivations(each.unit, None, WHOLE))
            elif inputs and each.keep is not None and each.unit in self._able:
                found.append(replace(each, swap=FIRST_INPUT))
                inputs -= 1
            else:
                found.append(each)
        return tuple(found)

    def trace(self, activations: tuple[UnitActivations, ...]) -> StepTrace:
        """The step with some activations of its units, as it is predicted."""
        return swapped_trace(kept_trace(self._kept.trace, activations, self._step), self._step)

    def ways(self, spare_bytes: int, host_bytes: int, compute_s: float) -> Iterator[Swaps]:
        """Ways for which the host has room, each with the largest filling for which the device has.

        Args:
            spare_bytes: room on the device if nothing is kept.
            host_bytes: room on the host.
            compute_s: seconds of compute of a step that keeps nothing.
        """
        if not self._able:
            return
        given = max(self._step.input_bytes[unit] for unit in self._able)
        saved = max(self._step.saved_bytes(unit) for unit in self._able) + given
        most = min(len(self._able), host_bytes // saved)
        for whole in sorted({most * share // SHARES for share in range(SHARES + 1)}):
            room = min(len(self._able) - whole, (host_bytes - whole * saved) // given)
            # Next to what is gone, one unit's activations leave or come back, and those of the next are there.
            in_flight = (2 * saved if whole else 0) + given
            fillings = list(self._fillings(self._spread(whole), compute_s))
            for inputs in sorted({room // 2, room} if room > 0 else {0}):
                spare = spare_bytes + inputs * given - in_flight
                fitting = [at for at, (nbytes, _) in enumerate(fillings) if nbytes <= spare]
                if fitting and (whole or inputs):
                    moved = whole * saved + inputs * given
                    yield Swaps(whole, inputs, fitting[-1], self._least_s(fillings[fitting[-1]][1], moved))

    def _fillings(self, whole: Collection[str], compute_s: float) -> Iterator[tuple[int, float]]:
        """Bytes that units hold from forward to backward more than if they kept nothing, and seconds of compute, by
        filling. The units in `whole` hold nothing, and do not run again."""
        nbytes = -sum(self._step.input_bytes[unit] for unit in whole)
        seconds = compute_s - sum(each.saved_s for each in self._kept.changes if each.activations.unit in whole)
        held: dict[str, int] = {}
        yield nbytes, seconds
        for each, kept, saved_s in self._kept.changes:
            unit = each.unit
            if unit not in whole:
                if each.keep is None and unit in self._saving:
                    kept = self._step.saved_bytes(unit) - self._step.dropped_bytes.get(unit, 0)
                nbytes += kept - held.get(unit, 0)
                seconds -= saved_s
                held[unit] = kept
            yield nbytes, seconds

    def _least_s(self, compute_s: float, moved: int) -> float:
        """Copies out have until forward is over, copies back have the time after it."""
        out_s, back_s = float(self._rates.offload([moved])[0]), float(self._rates.fetch([moved])[0])
        return max(compute_s, out_s + compute_s - self._forward_s, back_s + self._forward_s)

    @cached_property
    def _forward_s(self) -> float:
        trace = self._kept.trace
        forward = [access.phase == "forward" for access in trace.accesses]
        return float(self._rates.accesses_s(trace)[forward].sum())

    def _spread(self, count: int) -> frozenset[str]:
        """Takes so many of the units that can move anything, spread evenly."""
        parts = [number * count // len(self._able) for number in range(len(self._able) + 1)] if self._able else []
        return frozenset(unit for unit, less, more in zip(self._able, parts, parts[1:], strict=False) if less != more)
