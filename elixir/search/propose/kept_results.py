"""Fillings of the device with activations: what units keep for backward, most seconds a byte first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from elixir.search.problem.kept_trace import kept_bytes, kept_trace, saving_calls
from elixir.search.problem.placement import Floats
from elixir.search.simulator.rates import Rates
from elixir.step_trace import Result, StepTrace, UnitActivations, UnitForward


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

    @cached_property
    def saved_s(self) -> list[float]:
        """Seconds that each filling saves, from 0 on."""
        sums = [0.0]
        for change in self.changes:
            sums.append(sums[-1] + change.saved_s)
        return sums

    def activations(self, count: int) -> tuple[UnitActivations, ...]:
        """The filling with the first `count` changes."""
        kept = dict(self._least)
        for change in self.changes[:count]:
            kept[change.activations.unit] = change.activations
        return tuple(kept[unit.name] for unit in self.trace.units if unit.name in kept)

    def filled(self, count: int) -> StepTrace:
        """The step with that filling."""
        return self.with_activations(self.activations(count))

    def with_activations(self, activations: tuple[UnitActivations, ...]) -> StepTrace:
        """The step with some activations of its units."""
        return kept_trace(self.trace, activations)

    @cached_property
    def _ways(self) -> list[tuple[list[str], list[Choice]]]:
        """Units that do the same, and their choices, least first."""
        whole = {unit.name for unit in self.trace.units if unit.fetch == "parameters" or unit.form == "compiled"}
        calls = saving_calls(self.trace)
        found = []
        for forward in self.trace.forwards:
            for some in (True, False):
                units = [unit for unit in forward.units if (unit not in whole) == some]
                if units:
                    found.append((units, list(_best(self._choices(forward, len(calls[units[0]]), some=some)))))
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

    def _choices(self, forward: UnitForward, calls: int, *, some: bool) -> Iterator[Choice]:
        """Nothing, more and more results unless `some` is false, and everything; in each of so many calls."""
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
        every = calls * sum(each.saved_bytes for each in forward.operators)
        yield Choice(UnitActivations("", None), every, sum(seconds for seconds, _ in again))


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
