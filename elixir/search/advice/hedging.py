"""The share of the fastest step that a plan with a much better worst case would cost: `SearchRequest.hedge`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elixir.hardware import HardwareProfile
from elixir.plan import Plan
from elixir.schedule import ScheduleResult
from elixir.search.advice.what_suffices import Tries
from elixir.search.problem import MemoryModel, Placement, placement_of, setting_of, workload_of
from elixir.search.propose import Fillings
from elixir.search.request import SearchRequest
from elixir.search.simulator import SimulatedCost, simulate_step, worst_case
from elixir.step_trace import StepTrace

HEDGES = (0.02, 0.05, 0.1, 0.2)
"""Shares that are advised."""
MUCH_SHORTER = 0.9
"""A worst case is worth saying if it takes at most so much of that of the plan as it is."""
HARDLY_LESS = 0.95
"""Another packing, or a last look, gives a worst case of about so much of what is estimated at the least."""


@dataclass(frozen=True)
class Hedge:
    """A plan that a slow host hurts less than the one that was asked for."""

    hedge: float
    """`SearchRequest.hedge` with which it is made."""
    step_s: float
    """Seconds of its step on the host as the profile has it."""
    worst_s: float
    """On one with Adam and links as slow as in `worst_case`."""
    unhedged_worst_s: float
    """Likewise of the plan that was asked for."""


def better_hedge(
    plan: Plan, trace: StepTrace, hardware: HardwareProfile, request: SearchRequest, tries: Tries
) -> Hedge | None:
    """The least of `HEDGES` that makes nearly all of the difference; None if none makes the worst case much shorter.

    Args:
        plan: made from `trace` for `request`.
        trace: the step.
        hardware: the machine.
        request: as asked.
        tries: plans with a hedge.
    """
    fastest_s = plan.predicted.fastest_s
    if fastest_s is None or request.placement != "auto" or request.hedge >= HEDGES[-1]:
        return None
    slow = _OnSlowHost(plan, trace, hardware)
    enough_s = slow.step_s * MUCH_SHORTER
    # No plan is faster there than the fastest is here.
    if fastest_s > enough_s or slow.fullest_s() * HARDLY_LESS > enough_s:
        return None
    brief = tries.plan(trace, replace(request, hedge=HEDGES[-1]), briefly=True)
    if brief is None or simulate_step(brief, trace, worst_case(hardware)).step_s * HARDLY_LESS > enough_s:
        return None
    for hedge in HEDGES:
        if hedge <= request.hedge or brief.predicted.step_s > (1 + hedge) * fastest_s:
            continue
        found = tries.plan(trace, replace(request, hedge=hedge), briefly=False)
        worst_s = math.inf if found is None else simulate_step(found, trace, worst_case(hardware)).step_s
        if found is not None and worst_s <= enough_s:
            return Hedge(hedge, found.predicted.step_s, worst_s, slow.step_s)
    return None


class _OnSlowHost:
    """The plan on a host whose Adam and links are as slow as they may be."""

    def __init__(self, plan: Plan, trace: StepTrace, hardware: HardwareProfile) -> None:
        setting = setting_of(plan, hardware.ranks_per_host(plan.world_size))
        self._plan, self._may_speculate = plan, setting.speculate is not False
        self._model = MemoryModel(workload_of(plan, trace), setting)
        self._cost = SimulatedCost(trace, worst_case(hardware), setting)
        early = frozenset(index for index, chunk in enumerate(plan.chunks) if chunk.speculates)
        self.step_s = self._estimated_s(placement_of(plan), plan.block_count, early)
        """Seconds of its step."""

    def fullest_s(self) -> float:
        """Seconds with as many states on the device as it holds: about the best that other homes give."""
        plan, model = self._plan, self._model
        fillings = Fillings(model, plan.device_budget_bytes, self._cost)
        choice = fillings.hosting(0, fillings.block_range(plan.prefetch_depth).start, plan.prefetch_depth)
        if choice is None:
            return math.inf
        placement, blocks = choice
        left = plan.host_budget_bytes - model.need(placement, blocks).host_bytes
        if left < 0:
            return math.inf
        seconds = self._estimated_s(placement, blocks)
        early = self._may_speculate and self._cost.speculating(
            model.work,
            placement,
            self._schedule(placement, blocks),
            overlap=plan.overlap,
            left_bytes=left,
            needed=model.second_set_bytes,
        )
        return min(seconds, early[1]["total"]) if early else seconds

    def _schedule(self, placement: Placement, blocks: int) -> ScheduleResult:
        return self._model.work.schedule(placement.residents, self._plan.prefetch_depth).simulate(blocks)

    def _estimated_s(self, placement: Placement, blocks: int, early: frozenset[int] = frozenset()) -> float:
        schedule = self._schedule(placement, blocks)
        found = self._cost.estimate(
            self._model.work, placement, schedule, overlap=self._plan.overlap, speculating=early
        )
        return found["total"]
