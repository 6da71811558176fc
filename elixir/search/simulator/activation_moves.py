"""Copies of activations to the host and back: their seconds, and when in the trace's compute they begin and end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter, itemgetter

import numpy as np

from elixir.search.problem.packing import Ints
from elixir.search.problem.placement import Floats
from elixir.search.simulator.rates import Rates
from elixir.step_trace import StepTrace

_alike = attrgetter("direction", "begins", "begins_after", "ends", "ends_after", "planned")


class ActivationMoves:
    """Copies of one step on one machine, whatever its packing. Copies that begin and end together are one.

    Args:
        trace: the step.
        rates: of the machine.
        accesses_s: compute seconds of every access of the trace.
    """

    def __init__(self, trace: StepTrace, rates: Rates, accesses_s: Floats) -> None:
        runs = [list(run) for _, run in groupby(trace.transfers, _alike)]
        firsts = [run[0] for run in runs]
        self.outgoing = [each.direction == "device_to_host" for each in firsts]
        """Whether each goes to the host."""
        nbytes = np.array([each.nbytes for each in trace.transfers], dtype=np.int64)
        run_of = np.repeat(np.arange(len(runs)), list(map(len, runs)))
        seconds = np.where(np.array(self.outgoing, dtype=bool)[run_of], rates.offload(nbytes), rates.fetch(nbytes))
        self.seconds: list[float] = np.bincount(run_of, weights=seconds).tolist()
        ends = [(each.begins, each.begins_after, number, False) for number, each in enumerate(firsts)]
        ends += [(each.ends, each.ends_after, number, True) for number, each in enumerate(firsts)]
        at_once = [(key, [each[2] for each in run]) for key, run in groupby(sorted(ends), itemgetter(0, 1, 3))]
        self.together = [numbers for _, numbers in at_once]
        """Copies that begin, or are waited for, at the same moment, one after the other."""
        self.accesses: Ints = np.array([access for (access, _, _), _ in at_once], dtype=np.int64)
        """The access with the moment of each of `together`."""
        self.awaited = np.array([ends for (_, _, ends), _ in at_once], dtype=bool)
        """Whether they are waited for then, and do not begin."""
        shares = np.array(list(_shares(trace, rates, [key[:2] for key, _ in at_once])))
        before_s = np.concatenate(([0.0], np.cumsum(accesses_s)))
        self.at_s: Floats = before_s[self.accesses] + shares * accesses_s[self.accesses]
        """Seconds of the trace's own compute before that moment: a share of its access."""


def _shares(trace: StepTrace, rates: Rates, moments: list[tuple[int, int]]) -> Iterator[float]:
    """The part of its access that comes before each moment: an access, and how many of its operators are over."""
    each_s = rates.operations_s(trace) if moments else np.zeros(0)
    for access, run in groupby(moments, itemgetter(0)):
        seconds = np.cumsum(each_s[list(trace.accesses[access].operations)]).tolist()
        for _, after in run:
            yield seconds[after - 1] / seconds[-1] if 0 < after <= len(seconds) and seconds[-1] else 0.0
