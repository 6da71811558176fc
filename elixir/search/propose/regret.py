"""The plan with the least worst regret: the best plans of all scenarios, and some between them, judged in each.

The regret of a plan in a scenario is its seconds there over the least that are known there, less 1. The worst is that
of the scenario in which the plan loses most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace

from elixir.hardware.scenario import Scenario
from elixir.plan.prediction import Judgement
from elixir.search.problem.placement import Placement
from elixir.search.propose.best import Outcome, find_best
from elixir.search.propose.candidate import Candidate, updated_early, weigh
from elixir.search.propose.climb import DECIMALS, NEAR, TIE, climb
from elixir.search.propose.fillings import Fillings
from elixir.search.propose.local_search import LocalSearch
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.propose.trials import FEW_CHUNKS
from elixir.search.simulator.simulated_cost import SimulatedCost

ENOUGH = 0.03
"""No plan between those of the scenarios is looked for if one of these has no larger a regret."""
BLENDS = (0.25, 0.5, 0.75)
"""Numbers of chunks with states on the host, as parts of the way from one plan to another."""
PACKINGS = 3
"""Packings that are searched in scenarios other than the nominal one: its best."""


def find_surest(
    space: SearchSpace,
    budgets: Budgets,
    sizes: Sequence[int],
    prefetch_depth: int,
    scenarios: Sequence[Scenario],
    *,
    classic: bool = False,
    briefly: bool = False,
) -> Outcome:
    """Searches as `find_best` in each of `scenarios`, the first of which is the nominal one.

    Args:
        space, budgets, sizes, prefetch_depth, classic, briefly: as for `find_best`.
        scenarios: all that are possible. With one, plans nearly as fast as the fastest are compared by what they need
            of the host.
    """
    judged = Judged(space, scenarios)
    found = find_best(judged.spaces[scenarios[0]], budgets, sizes, prefetch_depth, classic=classic, briefly=briefly)
    if found.best is None:
        return found
    judged.add(found.best, found.resident)
    sizes = found.packings[:PACKINGS]
    few = len(found.best.work.chunks) <= FEW_CHUNKS
    for scenario in scenarios[1:]:
        if judged.best_s(scenario) > judged.least_s(scenario) * NEAR:
            # Slow links alone make few plans others.
            short = briefly or scenario.link < 1
            known = judged.candidates if few else ()
            here = find_best(judged.spaces[scenario], budgets, sizes, prefetch_depth, briefly=short, known=known)
            judged.add(here.best)
            judged.searched.append(scenario)
    if len(scenarios) == 1 and not briefly:
        _with_less(judged, found.best, budgets)
    if not briefly and min(map(judged.worst, judged.candidates)) > ENOUGH:
        _between(judged, budgets, sizes, prefetch_depth)
    return judged.outcome(found)


def judge_updates(plain: Candidate, space: SearchSpace, budgets: Budgets, scenarios: Sequence[Scenario]) -> Outcome:
    """Judges homes that are given: `plain`, and the same with the early updates that each scenario suggests.

    If the user asked for early updates, any that are faster at the nominal rates rule out `plain`.
    """
    judged = Judged(space, scenarios)
    plain = replace(plain, cost=judged.spaces[scenarios[0]].cost)
    costs = [here.cost for here in judged.spaces.values() if not here.cost.clipped]
    suggested = [updated_early(replace(plain, cost=cost), budgets) for cost in costs]
    early = [replace(each, cost=plain.cost) for each in suggested if each is not None]
    faster = [each for each in early if each.seconds["total"] < plain.seconds["total"]]
    judged.add(*(faster if space.setting.early_updates and faster else (plain, *early)))
    return judged.outcome(Outcome(plain, None))


def _with_less(judged: Judged, fastest: Candidate, budgets: Budgets) -> None:
    """Adds plans nearly as fast as the fastest whose host steps fewer chunks."""
    hosted = _hosted(fastest)
    fewer = [round(part * hosted) for part in (0, *BLENDS)] if hosted else []
    for plain in _hosting(fastest, fewer, budgets, fastest.cost):
        for candidate in (plain, updated_early(plain, budgets)):
            if candidate is not None and judged.is_within(candidate, TIE):
                judged.add(candidate)


def _between(judged: Judged, budgets: Budgets, sizes: Sequence[int], prefetch_depth: int) -> None:
    """Adds plans with the early updates that other rates suggest, for rates in the middle, and with homes between those
    of two plans, until the worst regret is small."""
    rates = [scenario for scenario in judged.spaces if scenario.clipped == judged.searched[0].clipped]
    slowest = min(rates, key=lambda scenario: (scenario.host_adam, scenario.link))
    middle = replace(slowest, host_adam=slowest.host_adam**0.5, link=slowest.link**0.5)
    costs = [judged.space.on(scenario).cost for scenario in (rates[0], middle, slowest)]

    def tried() -> Iterator[Candidate]:
        after_norm = {_identity(it.after_norm): it.after_norm for it in judged.candidates}
        yield from after_norm.values()
        for scenario in dict.fromkeys((middle, replace(middle, clipped=True))):
            here = judged.space.on(scenario)
            few = all(len(each.work.chunks) <= FEW_CHUNKS for each in judged.candidates)
            known = judged.candidates if few else ()
            found = find_best(here, budgets, sizes, prefetch_depth, briefly=True, known=known).best
            if found is not None:
                judged.add(found)
                yield after_norm.setdefault(_identity(found.after_norm), found.after_norm)
        first, *others = after_norm.values()
        for other in sorted(others, key=judged.worst):
            yield from _blended(first, other, budgets, judged.space.cost)

    most = min(map(judged.worst, judged.candidates))
    for plain in tried():
        for candidate in (plain, *(updated_early(replace(plain, cost=cost), budgets) for cost in costs)):
            if candidate is not None and judged.is_within(candidate, most + TIE):
                judged.add(candidate)
                most = min(most, judged.worst(candidate))
        if most <= ENOUGH:
            return
    _around(judged, budgets)


def _around(judged: Judged, budgets: Budgets) -> None:
    """Adds plans near the surest, if it has few chunks: one chunk changes at a time."""
    start = min(judged.candidates, key=judged.worst)
    setting = judged.space.setting
    if setting.spill or setting.early_updates is False or len(start.work.chunks) > FEW_CHUNKS:
        return
    gathered = setting.world_size > 1 and all(start.placement.resident)
    local = LocalSearch(start.model, budgets, judged.space.cost, gathered=gathered, early=True, briefly=True)
    depths = (start.schedule.prefetch_depth,)

    def better(here: Candidate, _most_s: float) -> Iterator[Candidate]:
        for other in local.neighbours(here, math.inf, depths=depths):
            if judged.is_within(other, judged.worst(here)):
                judged.add(other)
                yield other

    climb(start, better, lambda candidate: (judged.worst(candidate),))


def _blended(one: Candidate, other: Candidate, budgets: Budgets, cost: SimulatedCost) -> Iterator[Candidate]:
    """Candidates between two of the same packing, without early updates: the host has states of so many chunks."""
    if one.model is other.model:
        low, high = sorted((_hosted(one), _hosted(other)))
        yield from _hosting(one, (low + round(part * (high - low)) for part in BLENDS), budgets, cost)


def _hosted(candidate: Candidate) -> int:
    """Chunks that the host steps."""
    steps = candidate.cost.known(candidate.work).times.update_order
    return sum(not candidate.placement.state_on_device[chunk] for chunk in steps)


def _hosting(like: Candidate, counts: Iterable[int], budgets: Budgets, cost: SimulatedCost) -> Iterator[Candidate]:
    """Candidates of the same packing, without early updates: the host has states of so many chunks."""
    model, blocks, depth = like.model, like.schedule.blocks, like.schedule.prefetch_depth
    fillings = Fillings(model, budgets.device_bytes, cost)
    for hosted in dict.fromkeys(counts):
        choice = fillings.hosting(hosted, blocks, depth)
        if choice is not None:
            blend = weigh(model, *choice, depth, cost)
            if blend.need.host_bytes <= budgets.host_bytes:
                yield blend


class Judged:
    """Candidates, and their seconds in every scenario."""

    def __init__(self, space: SearchSpace, scenarios: Sequence[Scenario]) -> None:
        self.space = space
        self.spaces = {scenario: space.on(scenario) for scenario in scenarios}
        self.candidates: list[Candidate] = []
        self.searched: list[Scenario] = [scenarios[0]]
        """Scenarios whose best plan is known."""
        self._order = list(scenarios)
        self._looked_at: list[Candidate] = []
        self._seconds: dict[tuple[int, Scenario], float] = {}

    def add(self, *candidates: Candidate | None) -> None:
        """More to choose from, each once."""
        known = set(map(_identity, self.candidates))
        for candidate in candidates:
            if candidate is not None and _identity(candidate) not in known:
                known.add(_identity(candidate))
                self.candidates.append(candidate)

    def seconds(self, candidate: Candidate, scenario: Scenario) -> float:
        """The seconds of a candidate; without early updates, clipping is all the same."""
        unclipped = replace(scenario, clipped=False)
        if not candidate.placement.early and unclipped in self.spaces:
            scenario = unclipped
        key = id(candidate), scenario
        if key not in self._seconds:
            self._seconds[key] = candidate.seconds_by(self.spaces[scenario].cost)["total"]
        return self._seconds[key]

    def best_s(self, scenario: Scenario) -> float:
        """The least seconds that are known."""
        return min(self.seconds(candidate, scenario) for candidate in self.candidates)

    def least_s(self, scenario: Scenario) -> float:
        """Seconds that no plan can beat, if searches find the best: those of scenarios in which steps are shorter."""
        return max(self.best_s(other) for other in self.searched if scenario.is_no_faster(other))

    def worst(self, candidate: Candidate, among: Iterable[Scenario] = ()) -> float:
        """The worst regret of a candidate, among some scenarios or all."""
        return max(
            Judgement(each, self.seconds(candidate, each), self.best_s(each)).regret for each in among or self.spaces
        )

    def is_within(self, candidate: Candidate, most: float) -> bool:
        """Whether its worst regret is at most `most`; the first scenario in which it is not ends the look."""
        self._looked_at.append(candidate)  # its seconds are known by its id
        for each in self._order:
            if self.seconds(candidate, each) > self.best_s(each) * (1 + most):
                self._order.remove(each)
                self._order.insert(0, each)
                return False
        return True

    def surest(self) -> Candidate:
        """The candidate with the least worst regret; of those less than `TIE` apart the one that needs least of the
        host."""
        worst = [self.worst(candidate) for candidate in self.candidates]
        near = [
            (it.hosted_numel, it.need.host_bytes, round(regret, DECIMALS), it.sort_key, number)
            for number, (it, regret) in enumerate(zip(self.candidates, worst, strict=True))
            if regret < min(worst) + TIE
        ]
        return self.candidates[min(near)[-1]]

    def outcome(self, found: Outcome) -> Outcome:
        """The surest candidate as the best of what was found, with its seconds in every scenario."""
        nominal, best = self.searched[0], self.surest()
        return replace(
            found,
            best=replace(best, cost=self.spaces[nominal].cost),
            fastest_s=self.best_s(nominal),
            judgements=self.judgements(best) if len(self.spaces) > 1 else (),
            regret_if_known=self.regret_if_known(),
        )

    def judgements(self, candidate: Candidate) -> tuple[Judgement, ...]:
        """The seconds of a candidate in each scenario, with the least that are known there."""
        return tuple(
            Judgement(scenario, self.seconds(candidate, scenario), self.best_s(scenario)) for scenario in self.spaces
        )

    def regret_if_known(self) -> dict[str, float]:
        """The worst regret that would be left if one of the unknowns were known, by its name in `Scenario`."""
        found = {}
        for name in (field.name for field in fields(Scenario)):
            values = dict.fromkeys(getattr(scenario, name) for scenario in self.spaces)
            if len(values) > 1:
                parts = ([s for s in self.spaces if getattr(s, name) == value] for value in values)
                found[name] = max(min(self.worst(it, part) for it in self.candidates) for part in parts)
        return found


def _identity(candidate: Candidate) -> tuple[int, Placement, int, int]:
    return id(candidate.model), candidate.placement, candidate.schedule.blocks, candidate.schedule.prefetch_depth
