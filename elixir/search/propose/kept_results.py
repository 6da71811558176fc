"""Fillings of the device with activations: what units keep for backward, most seconds a byte first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from elixir.search.problem.kept_trace import kept_bytes, kept_trace
from elixir.search.problem.placement import Floats
from elixir.step_trace import Result, StepTrace, UnitActivations, UnitForward

Keep = tuple[Result, ...] | None


@dataclass(frozen=True)
class _Choice:
    """A choice of what a unit keeps, compared with nothing."""

    keep: Keep
    nbytes: int
    saved_s: float
    """Seconds that its backward is shorter."""


@dataclass(frozen=True)
class KeptResults:
    """Fillings of one step: with each, one unit keeps more than with the one before.

    A unit that keeps nothing runs again as a whole. Results whose operators take the most seconds a byte are kept
    first, in all units, and in the last units before the others.
    """

    trace: StepTrace
    """Keeps everything."""
    seconds: Floats
    """Seconds of each of its operations."""

    @cached_property
    def changes(self) -> tuple[tuple[str, Keep, float], ...]:
        """The unit that keeps more with each filling, all that it keeps then, and the seconds that this saves."""
        numbers = {unit.name: number for number, unit in enumerate(self.trace.units)}
        whole = {unit.name for unit in self.trace.units if unit.fetch == "parameters"}
        found = []
        for forward in self.trace.forwards:
            for some in (True, False):
                units = [unit for unit in forward.units if (unit not in whole) == some]
                choices = list(_best(self._choices(forward, some=some))) if units else []
                for rank, (less, more) in enumerate(pairwise(choices)):
                    saved_s = more.saved_s - less.saved_s
                    worth = saved_s / max(more.nbytes - less.nbytes, 1)
                    found += [((-worth, rank, -numbers[unit]), (unit, more.keep, saved_s)) for unit in units]
        return tuple(change for _, change in sorted(found, key=lambda each: each[0]))

    @cached_property
    def saved_s(self) -> list[float]:
        """Seconds that each filling saves, from 0 on."""
        sums = [0.0]
        for _, _, seconds in self.changes:
            sums.append(sums[-1] + seconds)
        return sums

    def activations(self, count: int) -> tuple[UnitActivations, ...]:
        """The filling with the first `count` changes."""
        kept: dict[str, Keep] = {unit: () for unit, _, _ in self.changes}
        for unit, keep, _ in self.changes[:count]:
            kept[unit] = keep
        return tuple(UnitActivations(unit.name, kept[unit.name]) for unit in self.trace.units if unit.name in kept)

    def filled(self, count: int) -> StepTrace:
        """The step with that filling."""
        return kept_trace(self.trace, self.activations(count))

    def _choices(self, forward: UnitForward, *, some: bool) -> Iterator[_Choice]:
        """Nothing, more and more results unless `some` is false, and everything."""
        yield _Choice((), 0, 0.0)
        again = [
            (0.0 if each.operation is None else float(self.seconds[each.operation]), each)
            for each in forward.operators[: forward.again]
        ]
        able = [(seconds, each) for seconds, each in again if each.keepable and seconds]
        keep: list[Result] = []
        saved_s = 0.0
        for seconds, each in sorted(able, key=lambda one: one[0] / one[1].made_bytes, reverse=True) if some else ():
            keep.append(Result(each.operator, each.occurrence))
            saved_s += seconds
            yield _Choice(tuple(sorted(keep)), kept_bytes(forward, frozenset(keep)), saved_s)
        yield _Choice(None, sum(each.saved_bytes for each in forward.operators), sum(seconds for seconds, _ in again))


def _best(choices: Iterator[_Choice]) -> Iterator[_Choice]:
    """The choices that no mix of two others beats: seconds saved a byte fall from one to the next."""
    hull: list[_Choice] = []
    for choice in sorted(choices, key=lambda each: (each.nbytes, -each.saved_s)):
        if hull and choice.saved_s <= hull[-1].saved_s:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) < _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    yield from hull


def _slope(less: _Choice, more: _Choice) -> float:
    return (more.saved_s - less.saved_s) / max(more.nbytes - less.nbytes, 1)
