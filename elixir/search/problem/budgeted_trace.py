"""The trace of a step whose compiled units have different memory budgets.

It follows from traces in which all of them have the same one: a compiled unit is one access in forward and one in
backward, whatever it keeps. The bytes and the work of these two are those of the trace with its budget. Between
the two it holds less than with a larger budget, and all other accesses see that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from elixir.search.problem.packing import Ints
from elixir.step_trace import StepTrace, UnitActivations, UnitRun


def budgeted_units(trace: StepTrace) -> dict[str, tuple[UnitRun, UnitRun]]:
    """The compiled units whose memory budget may be chosen -> their only runs in forward and in backward."""
    names, compiled = [unit.name for unit in trace.units], frozenset(trace.step.compiled)
    runs: dict[str, list[UnitRun]] = {}
    for run in trace.unit_runs:
        if names[run.unit] in compiled:
            runs.setdefault(names[run.unit], []).append(run)
    return {
        name: (found[0], found[1])
        for name, found in runs.items()
        if [run.phase for run in found] == ["forward", "backward"]
    }


@dataclass(frozen=True)
class BudgetedTraces:
    """Traces of one step by the memory budget of its `budgeted_units`."""

    whole: StepTrace
    """All units have the largest of these budgets."""
    under: Mapping[float | None, StepTrace]
    """By each other budget, all of these units have it."""
    largest: float | None = None
    """The largest budget; None: the one of PyTorch's setting."""

    @cached_property
    def runs(self) -> dict[str, tuple[UnitRun, UnitRun]]:
        """The units whose budget may be chosen, and their runs."""
        return budgeted_units(self.whole) if self.under or self.largest is not None else {}

    def get(self, budget: float | None) -> StepTrace:
        """The trace with this budget for all units."""
        return self.whole if budget == self.largest else self.under[budget]

    def more_bytes(self, unit: str, budget: float | None) -> int:
        """Bytes that a unit holds from forward to backward more than with the largest budget."""
        forward, _ = self.runs[unit]
        ends = [
            (each.accesses[forward.first], each.accesses[forward.last + 1]) for each in (self.whole, self.get(budget))
        ]
        whole, other = (end.kept_bytes - begin.kept_bytes for begin, end in ends)
        return other - whole

    def mixed(self, activations: Iterable[UnitActivations]) -> StepTrace:
        """The step with the budgets of these units, and the largest for all others."""
        budgets = {each.unit: each.budget for each in activations if each.unit in self.runs}
        budgets = {unit: budget for unit, budget in budgets.items() if budget != self.largest}
        if not budgets:
            return self.whole
        accesses, operations = list(self.whole.accesses), {each: at for at, each in enumerate(self.whole.operations)}
        more = self._more(budgets)
        for index, access in enumerate(accesses):
            accesses[index] = replace(
                access, live_bytes=access.live_bytes + more[index], kept_bytes=access.kept_bytes + more[index]
            )
        for budget in dict.fromkeys(budgets.values()):
            trace, alike = self.under[budget], self._more(dict.fromkeys(self.runs, budget))
            for unit, runs in self.runs.items():
                for index in (
                    [i for run in runs for i in range(run.first, run.last + 1)] if budgets.get(unit) == budget else ()
                ):
                    access, rest = trace.accesses[index], more[index] - alike[index]
                    accesses[index] = replace(
                        access,
                        operations=tuple(
                            operations.setdefault(trace.operations[at], len(operations)) for at in access.operations
                        ),
                        live_bytes=access.live_bytes + rest,
                        kept_bytes=access.kept_bytes + rest,
                    )
        return replace(self.whole, accesses=tuple(accesses), operations=tuple(operations))

    def _more(self, budgets: Mapping[str, float | None]) -> list[int]:
        """By access, the bytes that units hold there, after their forward and before their backward, more than with the
        largest budget."""
        change: Ints = np.zeros(len(self.whole.accesses) + 1, dtype=np.int64)
        for unit, budget in budgets.items():
            forward, backward = self.runs[unit]
            more = self.more_bytes(unit, budget)
            change[forward.last + 1] += more
            change[backward.first] -= more
        found: list[int] = np.cumsum(change[:-1]).tolist()
        return found
