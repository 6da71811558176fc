"""Units that move activations to the host, next to what the others keep on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from elixir.search.problem.swapped_trace import FIRST_INPUT, WHOLE, SwappableStep, swapped_trace
from elixir.search.propose.kept_results import KeptResults
from elixir.search.simulator.rates import Rates
from elixir.step_trace import StepTrace, UnitActivations

SHARES = 4
"""The search looks at so many numbers of units, up to what the host holds, and at none."""


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
        self._step = SwappableStep(kept.trace)
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

    def trace(self, swaps: Swaps) -> StepTrace:
        """The step, as it is predicted."""
        return swapped_trace(self._kept.with_activations(self.activations(swaps)), self._step)

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
                    kept = self._step.saved_bytes(unit)
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
