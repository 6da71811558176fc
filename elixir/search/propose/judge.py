"""Seconds of candidates in all scenarios: floors first, simulations of those that may win, and the pool of all of
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from operator import itemgetter

import numpy as np

from elixir.hardware.scenario import Scenario
from elixir.plan.prediction import Judgement
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Codes, Floats, Ints, Placement
from elixir.search.propose.candidate import Candidate, early_host_bytes
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.simulator.floors import Floors

DECIMALS = 9
"""Digits of seconds by which candidates are put in order: machines may give the last bits of a sum differently."""
LEAST_S = 1e-12
"""No step is shorter: regrets are ratios, also where a step has no work."""
LITTLE = 2e-4
"""A candidate whose floor is this little below the best is not simulated."""
TIE = 0.01
"""Regrets this little apart are as good: the plan that needs least of the host is taken."""
TIE_WITHOUT_HOST = 0.05
"""The same for a plan that needs nothing of the host, whose seconds depend on one rate less.

Source: GPT-2 medium, layers compiled, in 64 GB of an H200 (`benchmark/results/gpu_proof_h200.jsonl`): four of 25 chunks
stepped on the host were to save 1.7 %, their step took four times as long as it was to, and the whole step 18 % longer.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a search."""

    best: Candidate
    fastest_s: float | None = None
    """Seconds of the fastest step there is, at the nominal rates."""
    judgements: tuple[Judgement, ...] = ()
    """The best in each scenario; empty if it was chosen for one."""
    regret_if_known: dict[str, float] = field(default_factory=dict)
    """`Prediction.regret_if_known`."""


Key = tuple[int, Placement, int, int]
"""The packing, the homes, the blocks and the depth of a candidate."""
Aim = Mapping[Scenario, float]
"""Scenarios, with the seconds to which those of a candidate are compared. Its score is the largest ratio."""


def key_of(candidate: Candidate) -> Key:
    """Identifies a candidate."""
    schedule = candidate.schedule
    return id(candidate.model), candidate.placement, schedule.blocks, schedule.prefetch_depth


def scores_of(seconds: Floats, among: Sequence[Scenario], aim: Aim) -> Floats:
    """Scores of what takes so many seconds by scenario, and, for instance, placement."""
    with np.errstate(invalid="ignore"):
        ratios = np.max([seconds[among.index(each)] / aim[each] for each in aim], axis=0)
    return np.where(np.isnan(ratios), np.inf, ratios).round(DECIMALS)


class Judge:
    """The pool of candidates.

    Args:
        space: of the question.
        scenarios: that are possible, the nominal one first.
        budgets: memory for second sets.
    """

    def __init__(self, space: SearchSpace, scenarios: Sequence[Scenario], budgets: Budgets) -> None:
        self.scenarios, self.budgets, self.setting = tuple(scenarios), budgets, space.setting
        self.nominal = self.scenarios[0]
        self.spaces = {scenario: space.on(scenario) for scenario in scenarios}
        self.pool: dict[Key, Candidate] = {}
        """All that were simulated in any scenario."""
        self.simulations = 0
        self._seconds: dict[Key, dict[Scenario, float]] = {}
        self.best_s = dict.fromkeys(self.scenarios, math.inf)
        """The least seconds that are known, by scenario."""
        self._best: dict[Scenario, Candidate] = {}
        self._bounds: dict[tuple[Key, tuple[Scenario, ...]], Floats] = {}
        self._floors: dict[tuple[int, tuple[Scenario, ...]], Floors] = {}

    def _as_seen(self, scenario: Scenario, *, early: bool) -> Scenario:
        """The scenario that stands for this one: clipping discards nothing but states made early."""
        kept = replace(scenario, clipped=False)
        return kept if not early and kept in self.spaces else scenario

    def seconds(self, candidate: Candidate, scenario: Scenario) -> float:
        """Simulated seconds of a step."""
        early = bool(candidate.placement.early)
        scenario, key = self._as_seen(scenario, early=early), key_of(candidate)
        known = self._seconds.setdefault(key, {})
        if scenario not in known:
            self.pool.setdefault(key, candidate)
            self.simulations += 1
            found = known[scenario] = max(candidate.seconds_by(self.spaces[scenario].cost)["total"], LEAST_S)
            for each in self.scenarios:
                if self._as_seen(each, early=early) == scenario and found < self.best_s[each]:
                    self.best_s[each], self._best[each] = found, candidate
        return known[scenario]

    # --- floors -------------------------------------------------------------------------------------------------------

    def floors(
        self,
        model: MemoryModel,
        among: Sequence[Scenario],
        codes: Codes,
        blocks: Ints,
        *,
        early: bool,
        prefetch: bool,
        host_bytes: Ints | None = None,
    ) -> Floats:
        """Floors of placements of one packing: [scenario, placement].

        Args:
            model: of the packing.
            among: scenarios.
            codes, blocks, prefetch: as `Floors.seconds` takes them.
            early: whether chunks may be updated early.
            host_bytes: needed by placement, second sets left out; None: there is room for all of these.
        """
        rates = tuple(dict.fromkeys(replace(each, clipped=False) for each in among))
        key, room = (id(model), rates), None
        if key not in self._floors:
            nominal = self.spaces[self.nominal]
            self._floors[key] = Floors([nominal.on(each).cost.times(model) for each in rates])
        floors = self._floors[key]
        if early and host_bytes is not None and not self.setting.spill:
            room = early_host_bytes(model, self.budgets) - host_bytes
        ahead = prefetch and self.setting.overlap
        found = {
            kept: floors.seconds(
                codes, np.maximum(blocks, 0), early=kept, prefetch=ahead, room_bytes=room if kept else None
            )
            for kept in {early and not each.clipped for each in among}
        }
        rows = [found[early and not each.clipped][rates.index(replace(each, clipped=False))] for each in among]
        return np.stack(rows)

    def bounds(self, some: Sequence[Candidate], among: Sequence[Scenario]) -> Floats:
        """Floors of candidates: [candidate, scenario]."""
        among = tuple(among)
        groups: dict[tuple[int, bool, bool], list[Candidate]] = {}
        for candidate in some:
            if (key_of(candidate), among) not in self._bounds:
                prefetch = candidate.schedule.prefetch_depth > 0 or not candidate.schedule.blocks
                kind = id(candidate.model), bool(candidate.placement.early), prefetch
                groups.setdefault(kind, []).append(candidate)
        for (_, early, prefetch), group in groups.items():
            codes = np.stack([candidate.placement.codes for candidate in group])
            blocks = np.array([candidate.schedule.blocks for candidate in group])
            found = self.floors(group[0].model, among, codes, blocks, early=early, prefetch=prefetch)
            for candidate, bounds in zip(group, found.T, strict=True):
                self._bounds[key_of(candidate), among] = bounds
        return np.array([self._bounds[key_of(each), among] for each in some]).reshape(len(some), len(among))

    # --- scores -------------------------------------------------------------------------------------------------------

    @property
    def known(self) -> Aim:
        """All scenarios with the least seconds that are known: one more than a worst regret is a score for them."""
        return dict(self.best_s)

    def score(self, candidate: Candidate, aim: Aim, most: float = math.inf) -> float:
        """The largest ratio of seconds to those of an aim; infinite as soon as it is above `most`."""
        scenarios = tuple(aim)
        bounds = self._least([candidate], scenarios)[0] / np.array(list(aim.values()))
        if (bounds > most).any():
            return math.inf
        worst = 0.0
        for column in np.argsort(-bounds, kind="stable").tolist():  # first where it is likely to be slowest
            worst = max(worst, self.seconds(candidate, scenarios[column]) / aim[scenarios[column]])
            if worst > most:
                return math.inf
        return worst

    def _least(self, some: Sequence[Candidate], among: Sequence[Scenario]) -> Floats:
        """Seconds of candidates where they are known, otherwise their floors: [candidate, scenario]."""
        found = self.bounds(some, among)
        for row, candidate in enumerate(some):
            known, early = self._seconds.get(key_of(candidate), {}), bool(candidate.placement.early)
            for column, scenario in enumerate(among):
                found[row, column] = known.get(self._as_seen(scenario, early=early), found[row, column])
        return found

    @property
    def fitting(self) -> list[Candidate]:
        """Candidates of the pool that the host holds."""
        return [it for it in self.pool.values() if it.need.host_bytes <= self.budgets.host_bytes]

    def promising(self, aim: Aim, count: int) -> list[Candidate]:
        """The candidates of the pool with the least floors."""
        pool = self.fitting
        scores = scores_of(self.bounds(pool, self.scenarios).T, self.scenarios, aim)
        return [pool[row] for row in np.argsort(scores, kind="stable")[:count].tolist()]

    def fastest(self, simulations: int = 0) -> Candidate:
        """The candidate with the least nominal seconds, then with the most thrift; `simulations` at most tell more of
        the pool."""
        pool, best_s = self.fitting, self.best_s[self.nominal]
        bounds = self._least(pool, (self.nominal,))[:, 0].tolist()
        for bound, it in sorted(zip(bounds, pool, strict=True), key=itemgetter(0))[:simulations]:
            if bound < best_s * (1 - LITTLE):
                self.seconds(it, self.nominal)
        known = [it for it in pool if self.nominal in self._seconds[key_of(it)]]
        return min(known, key=lambda it: (round(self.seconds(it, self.nominal), DECIMALS), *it.thrift))

    def surest(self) -> Candidate:
        """The candidate with the least worst regret; of those that are as good, the one that needs least of the
        host."""
        pool, most = self.fitting, math.inf
        surest = pool[0]
        scores = scores_of(self._least(pool, self.scenarios).T, self.scenarios, self.known).tolist()
        ranked = sorted(zip(scores, pool, strict=True), key=itemgetter(0))
        for least, it in ranked:
            if least >= most:
                break
            worst = self.score(it, self.known, most)
            if worst < most:
                most, surest = worst, it
        near = sorted((it for least, it in ranked if least < most + tie(it)), key=_needs)
        for _, alike in groupby(near, _needs):
            judged = [(round(self.score(it, self.known, most + tie(it)), DECIMALS), it) for it in alike]
            worst, best = min(judged, key=itemgetter(0))
            if worst < most + tie(best):
                return best
        return surest  # if what was simulated since makes all others, and it, less sure

    def regret_if_known(self, candidate: Candidate) -> dict[str, float]:
        """The worst regret that would be left if one of the unknowns were known, by its name in `Scenario`: that of a
        candidate, or of one of those that are best in a scenario."""
        among = {key_of(each): each for each in (candidate, *self._best.values())}.values()
        found = {}
        for name in (each.name for each in fields(Scenario)):
            values = dict.fromkeys(getattr(scenario, name) for scenario in self.scenarios)
            if len(values) > 1:
                parts = ([each for each in self.scenarios if getattr(each, name) == value] for value in values)
                found[name] = max(min(self._worst(it, part) for it in among) for part in parts)
        return found

    def _worst(self, candidate: Candidate, among: Sequence[Scenario]) -> float:
        return max(self.seconds(candidate, each) / self.best_s[each] - 1 for each in among)

    def outcome(self, candidate: Candidate) -> Outcome:
        """The candidate as the result of a search."""
        several = self.scenarios if len(self.scenarios) > 1 else ()
        seconds = [(each, self.seconds(candidate, each)) for each in several]
        judgements = tuple(Judgement(each, step_s, self.best_s[each]) for each, step_s in seconds)
        known = self.regret_if_known(candidate)
        best = replace(candidate, cost=self.spaces[self.nominal].cost)
        return Outcome(best, self.best_s[self.nominal], judgements, known)


def _needs(candidate: Candidate) -> tuple[int, int]:
    """Elements whose states a candidate leaves to the host, and bytes of its memory."""
    return candidate.hosted_numel, candidate.need.host_bytes


def tie(candidate: Candidate) -> float:
    """The regret that a candidate may have above the least and be as good."""
    return TIE if any(_needs(candidate)) else TIE_WITHOUT_HOST
