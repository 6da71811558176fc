"""The search: floors rank the shapes of all packings, simulations confirm a few, and one climb goes on from the best.

The climb changes one number of a shape at a time, then one chunk. Its key is the seconds of the nominal scenario,
those of another one, or the worst regret over all. Whatever was simulated is in one pool (`Judge`), and the plan is the
best of that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from elixir.hardware.scenario import Scenario
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packing import Ints
from elixir.search.problem.placement import RESIDENT, Floats, Placement
from elixir.search.propose.candidate import Candidate, early_host_bytes, weigh
from elixir.search.propose.family import IN_ORDER, SPREAD, Family, Rows, Shape, families
from elixir.search.propose.judge import TIE, Judge, Key, Outcome, key_of
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.request import HomeChoice

GAP = 1e-3
"""A step this little above the least floor of all shapes is not improved."""
LITTLE = 2e-4
"""A candidate whose floor is this little below the best is not simulated."""
NEAR = 0.01
"""In other scenarios nothing is looked for if the best that is known is this little above the floor."""
ENOUGH = 0.01
"""A worst regret that is not improved."""
GRID = 17
"""Numbers of chunks with states away that are looked at first, per packing and number of blocks."""
PACKINGS = 3
"""Packings looked at in scenarios other than the nominal one, next to that of the fastest shape."""
PROBES, STARTS, CLIMBED = 48, 4, 16
"""Simulations before the nominal climbs, shapes from which these start, and simulations of a climb in another
scenario."""
BETWEEN = 7
"""`WORK` for shapes between those of the scenarios."""
LOOKS = 12
"""Shapes between those of the scenarios that are judged before a climb."""
EXACT = 300
"""Simulations for all packings together of which all placements are looked at."""
LESS = 5
"""Shapes that leave less to the host, and the fastest one."""
WORK, MOST = 6_000, 400
"""Simulations times chunks of the climb over single chunks, and simulations at most."""
FEW_CHUNKS = 32
"""Up to so many, pairs of chunks change together, and the nominal gap is closed whatever it is."""

Score = Callable[[Candidate, float], float]
"""A number that a climb lessens. It takes a candidate, and the best so far, above which any number may be infinite."""


class ShapeSearch:
    """One search.

    Args:
        space: of the question.
        budgets: memory of device and host.
        sizes: capacities of chunks to pack with.
        scenarios: that are possible, the nominal one first.
        homes: of all chunks, if they are given.
    """

    def __init__(
        self,
        space: SearchSpace,
        budgets: Budgets,
        sizes: Iterable[int],
        scenarios: Sequence[Scenario],
        homes: HomeChoice = "auto",
    ) -> None:
        self._space, self._budgets = space.on(scenarios[0]), budgets
        self.judge = Judge(space, scenarios, budgets)
        self._nominal, self._robust = scenarios[0], len(scenarios) > 1
        setting = space.setting
        self._early = setting.early_updates is not False and not self._nominal.clipped
        self._all = families(self._space, budgets, sizes, homes)
        self._models = {id(family.model): family.model for family in self._all}
        self._families = [family for family in self._all if family.least_away <= family.most_away]
        self._looks: dict[tuple[int, Scenario], list[tuple[float, Shape]]] = {}
        self._shapes: dict[Key, Shape] = {}
        self._weighed: dict[tuple[int, Placement, int, int, float, int], Candidate | None] = {}
        self.least_s = math.inf
        """The least floor of all shapes at the nominal rates."""

    def find(self, *, sure: bool = True) -> Outcome:
        """The plan with the least worst regret; the fastest in the nominal scenario, if not `sure`."""
        if self._space.hardware.device_kind == "cpu":
            self._look_at_resident()
        if self.judge.pool:  # lanes would only take cores from compute
            return self.judge.outcome(self.judge.fastest())
        here = self._fastest_shape() if self._families else None
        self._look_at_all_of_few()
        if not self.judge.pool:
            return Outcome(None)
        self._change_best(robust=False)
        if self._robust and here is not None:
            self._look_in_others(here)
            self._look_between(here)
            self._change_best(robust=True)
        if sure and here is not None:
            self._look_at_less_on_host(here)
        return self.judge.outcome(self._best(robust=sure))

    def floors(self) -> list[tuple[float, int]]:
        """The least nominal floor of each packing of which something fits, and its capacity; the least first."""
        looks = ((self._look(family, self._nominal)[:1], family) for family in self._families)
        found = [(floor_s, family.work.packing.capacity_bytes) for look, family in looks for floor_s, _ in look]
        return sorted(found)

    def _best(self, *, robust: bool) -> Candidate:
        return self.judge.surest() if robust else self.judge.fastest()

    @property
    def _is_near(self) -> bool:
        """Whether the fastest step is as good as the least floor."""
        best_s = self.judge.best_s(self._nominal)
        return best_s < math.inf and best_s <= self.least_s * (1 + GAP)

    def _look_at_resident(self) -> None:
        """The placements of all packings that keep everything on the device."""
        for family in self._families:
            made = self._make(Shape(family, 0, family.fewest[0], 0))
            if made is not None and made.placement.keeps_everything:
                self.judge.seconds(made, self._nominal)

    # --- shapes -------------------------------------------------------------------------------------------------------

    def _floors(self, family: Family, scenario: Scenario, rows: Rows, *, depth: int) -> Floats:
        able = self._early and not scenario.clipped
        found = self.judge.floors(
            family.model, scenario, rows.codes, rows.blocks, early=able, prefetch=depth > 0, host_bytes=rows.host_bytes
        )
        return np.where(rows.fits, np.round(found, 9), np.inf)

    def _counts(self, family: Family, *, few: bool) -> list[int]:
        """Numbers of blocks that are looked at."""
        low, high = family.fewest[min(1, len(family.fewest) - 1)], family.fewest[-1]
        if few:
            return sorted({low, high})
        found, most = {family.fewest[0], low, high}, family.most_blocks
        if family.several and not family.gathered:
            step = 2 * high
            while 0 < step < most:
                found.add(step)
                step *= 2
            found.add(max(most, high))
        return sorted(found)

    def _look(self, family: Family, scenario: Scenario) -> list[tuple[float, Shape]]:
        """The shapes with the least floors, one for each number of blocks and of states away, with that floor."""
        key = id(family), scenario
        if key not in self._looks:
            nominal = scenario == self._nominal
            found: dict[tuple[int, int], tuple[float, Shape]] = {}
            for blocks, share in product(self._counts(family, few=not nominal), (1.0,) if nominal else (1.0, 0.0)):
                depth = family.depth(blocks)
                grid = _spread(family.least_away, family.most_away)
                for _ in range(2 if nominal else 1):
                    floors = self._floors(family, scenario, family.rows(grid, blocks, share=share), depth=depth)
                    best = int(np.argmin(floors))
                    if floors[best] == np.inf:
                        break
                    shape = Shape(family, int(grid[best]), blocks, depth, share=share)
                    before = found.get((shape.away, blocks))
                    if before is None or floors[best] < before[0]:
                        found[shape.away, blocks] = float(floors[best]), shape
                    low, high = int(grid[max(best - 1, 0)]), int(grid[min(best + 1, len(grid) - 1)])
                    if high - low <= 2:
                        break
                    grid = _spread(low, high)
            # Of shapes with equal floors the one that fetches further ahead is likelier to reach it.
            self._looks[key] = sorted(found.values(), key=lambda each: (each[0], -each[1].depth, each[1].away))
        return self._looks[key]

    def _make(self, shape: Shape) -> Candidate | None:
        """The candidate of a shape; None if it does not fit."""
        if not 0 <= shape.depth < len(shape.family.fewest):
            return None
        placed = shape.family.placed(shape)
        if placed is None:
            return None
        made = self._weigh(shape.family.model, *placed, shape.depth, shape.speed, shape.rule)
        if made is not None:
            self._shapes.setdefault(key_of(made), shape)
        return made

    def _weigh(
        self, model: MemoryModel, placement: Placement, blocks: int, depth: int, speed: float = 0.0, rule: int = 0
    ) -> Candidate | None:
        """The candidate with these homes; with a speed, and chunks updated early that such a host takes. None if it
        does not fit, or none can be."""
        depth = depth if placement.resident.count(False) else 0
        key = id(model), placement, blocks, depth, speed, rule
        if key not in self._weighed:
            self._weighed[key] = self._made(model, placement, blocks, depth, speed, rule)
        return self._weighed[key]

    def _made(
        self, model: MemoryModel, placement: Placement, blocks: int, depth: int, speed: float, rule: int
    ) -> Candidate | None:
        fewest = model.work.schedule(placement.residents, depth).min_blocks
        if blocks < fewest:
            return None
        found = weigh(model, placement, blocks if fewest else 0, depth, self._space.cost)
        left_bytes = early_host_bytes(model, self._budgets) - found.need.host_bytes
        if found.need.host_bytes > self._budgets.host_bytes or not speed:
            return found if found.need.host_bytes <= self._budgets.host_bytes else None
        early = self._space.cost.early_chunks(
            model.work, found.placement, speed=speed, left_bytes=left_bytes, rule=rule
        )
        return replace(found, placement=found.placement.updated_early(early)) if early else None

    # --- the climb over shapes ----------------------------------------------------------------------------------------

    def _fastest_shape(self) -> Shape | None:
        """Simulates the shapes with the least nominal floors, and climbs from the best of them."""
        at = self._nominal
        seen = [each for family in self._families for each in self._look(family, at)]
        seen.sort(key=lambda each: (each[0], -each[1].depth))
        if not seen:
            return None
        self.least_s = seen[0][0]
        tries: list[tuple[float, int, Shape]] = []
        taken = Counter[int]()
        for floor_s, shape in seen:
            if floor_s >= self.judge.best_s(at) * (1 - LITTLE) or self._is_near or len(tries) >= PROBES:
                break
            if taken[id(shape.family)] < 2:
                taken[id(shape.family)] += 1
                tries += [(step_s, len(tries) + n, it) for n, (step_s, it) in enumerate(self._probed(shape))]
        if not tries:  # the first look takes early updates for granted, of which the host may have no room
            for _, shape in seen:
                made = self._make(shape) or self._make(replace(shape, depth=0))
                if made is not None:
                    return replace(shape, depth=made.schedule.prefetch_depth) if self.judge.seconds(made, at) else shape
            return None
        found: list[tuple[float, int, Shape]] = []
        climbed: set[tuple[int, int, bool]] = set()
        for step_s, number, shape in sorted(tries, key=lambda each: each[:2]):
            slow = found and step_s > min(found)[0] * 1.1
            if len(climbed) == STARTS or slow or self._is_near:
                break
            key = id(shape.family), shape.blocks, shape.speed > 0
            if key in climbed or self._look(shape.family, at)[0][0] >= self.judge.best_s(at) * (1 - LITTLE):
                continue
            climbed.add(key)
            there = self._climb(shape, lambda it, _: self.judge.seconds(it, at), at, enough=self.least_s * (1 + GAP))
            found.append((there[0], number, there[1]))
        return min([*found, *tries], key=lambda each: each[:2])[2]

    def _probed(self, shape: Shape) -> Iterator[tuple[float, Shape]]:
        """A shape, with early updates by each rule, weights in both orders and none, until one is near its floor."""
        for speed, rule in ((0.0, 0), (1.0, 0), (1.0, 1), (1.0, 2)) if self._early else ((0.0, 0),):
            for order, share in ((IN_ORDER, 1.0), (SPREAD, 1.0), (IN_ORDER, 0.0)):
                tried = replace(shape, speed=speed, order=order, share=share, rule=rule)
                placed = shape.family.placed(tried)
                if placed is None or ((order, share) != (IN_ORDER, 1.0) and not placed[0].resident.count(False)):
                    continue
                made = self._make(tried)
                if made is not None:
                    yield self.judge.seconds(made, self._nominal), tried
            if self._is_near:
                return

    def _neighbours(self, shape: Shape, step: int) -> Iterator[Shape]:
        """Shapes that differ in one number: with a `step` above 1, in the states that are away."""
        family = shape.family
        for away in (shape.away - step, shape.away + step):
            within = min(max(away, family.least_away), family.most_away)
            if within != shape.away:
                yield replace(shape, away=within)
        if step > 1:
            return
        placed = family.placed(shape)
        if placed is not None and placed[0].resident.count(False):
            yield from self._other_blocks(shape)
        if shape.speed:
            yield from (replace(shape, rule=rule) for rule in range(3) if rule != shape.rule)
            speeds = (shape.speed * factor for factor in (1.15, 1 / 1.15, 1.4, 1 / 1.4, 0.5, 2.0))
            yield from (replace(shape, speed=speed) for speed in speeds if 0.2 <= speed <= 4)
        elif self._early:
            yield replace(shape, speed=1.0)

    def _other_blocks(self, shape: Shape) -> Iterator[Shape]:
        """The shape with other blocks, fetched less or further ahead, and with the other order of weights."""
        family = shape.family
        for depth in (shape.depth - 1, shape.depth + 1):
            if 0 <= depth < len(family.fewest):
                fewest = family.fewest[depth]
                for blocks in dict.fromkeys((max(shape.blocks, fewest), fewest)):
                    yield replace(shape, depth=depth, blocks=blocks)
        yield replace(shape, order=1 - shape.order)
        yield from (replace(shape, share=share) for share in (0.0, 0.25, 0.5, 0.75, 1.0) if share != shape.share)
        for blocks in (shape.blocks + 1, 2 * shape.blocks, shape.blocks - 1, shape.blocks // 2):
            if blocks >= family.fewest[0]:
                yield replace(shape, blocks=blocks, depth=min(shape.depth, family.depth(blocks)))

    def _climb(
        self, start: Shape, score: Score, at: Scenario | None, *, most: int = 60, enough: float = 0.0
    ) -> tuple[float, Shape]:
        """The best shape near one, and its score: first by states away, in halved steps, then by all numbers.

        Args:
            start: where it begins.
            score: what it lessens.
            at: a scenario whose floors bound the score; None: the score looks at floors itself.
            most: simulations, about.
            enough: a score that needs no improvement.
        """
        made = self._make(start)
        here, best = start, math.inf if made is None else score(made, math.inf)
        tried, step = {start}, max((start.family.most_away - start.family.least_away) // 8, 1)
        while most > 0 and best > enough:
            better = None
            for other in self._neighbours(here, step):
                if other in tried or most <= 0:
                    continue
                tried.add(other)
                candidate = self._make(other)
                if candidate is None or (at is not None and self.judge.bound(candidate, at) > best * (1 - LITTLE)):
                    continue
                most -= 1
                found = score(candidate, best)
                if found < best * (1 - 1e-9):
                    best, better = found, other
                    if step == 1:
                        break
            if better is not None:
                here = better
            elif step > 1:
                step //= 2
            else:
                break
        return best, here

    # --- all scenarios ------------------------------------------------------------------------------------------------

    def _near_families(self, here: Shape) -> list[Family]:
        """The packing of a shape, and those with the least nominal floors."""
        least = {id(f): (self._look(f, self._nominal) or [(math.inf, here)])[0][0] for f in self._families}
        order = sorted(self._families, key=lambda family: least[id(family)])
        return list(dict.fromkeys([here.family, *order[:PACKINGS]]))

    def _look_in_others(self, here: Shape) -> None:
        """The best of each other scenario: of what is known, and by a climb where floors leave room for more."""
        for number, at in enumerate(self.judge.scenarios[1:], 1):
            pool = self.judge.fitting
            bounds = self.judge.bounds(pool)[:, number]
            for row in np.argsort(np.round(bounds, 9), kind="stable")[:3].tolist():
                if bounds[row] < self.judge.best_s(at):
                    self.judge.seconds(pool[row], at)
            looks = [each for family in self._near_families(here) for each in self._look(family, at)]
            if not looks:
                continue
            floor_s, shape = min(looks, key=lambda each: (each[0], -each[1].depth))
            if self.judge.best_s(at) > floor_s * (1 + NEAR):
                speed = max(at.host_adam, 0.25) if self._early and not at.clipped else 0.0
                score: Score = lambda it, _, at=at: self.judge.seconds(it, at)  # type: ignore[misc]  # noqa: E731
                made = self._make(replace(shape, speed=speed, order=here.order))
                if made is not None:
                    self.judge.seconds(made, at)
                start = self._shapes.get(
                    key_of(self.judge.best(at)), here
                )  # of all that is known, with the floor's shape
                self._climb(start, score, at, most=CLIMBED, enough=floor_s * (1 + GAP))

    def _score(self, candidate: Candidate, most: float) -> float:
        """One more than the worst regret."""
        return 1 + self.judge.regret(candidate, most - 1)

    def _look_between(self, here: Shape) -> None:
        """The best homes of each scenario, and shapes with the least worst regret of their floors, with early updates
        that faster and slower hosts suggest; and a climb from the best shape."""
        worst = self.judge.regret(self.judge.surest())
        ranked = self._by_regret(here) if worst > ENOUGH else []
        if not ranked or worst <= ranked[0][0] - 1 + TIE:  # no shape is clearly surer
            return
        speeds = (1.0, 0.5, 0.3) if self._early else ()
        least, most = math.inf, self.judge.simulations + BETWEEN * WORK // here.family.count
        for plain in dict.fromkeys(key_of(it.after_norm) for it in map(self.judge.best, self.judge.scenarios)):
            _, placement, blocks, depth = plain
            for speed in (0.0, *speeds) if self.judge.simulations < most else ():
                least = min(
                    least, self._worst(self._weigh(self._models[plain[0]], placement, blocks, depth, speed), least)
                )
        found: dict[int, tuple[float, Shape]] = {}
        taken = Counter[int]()
        for regret, shape in ranked:
            if regret - 1 > least or taken.total() >= LOOKS or self.judge.simulations >= most:
                break
            if taken[id(shape.family)] >= LOOKS // 2:
                continue
            taken[id(shape.family)] += 1
            for speed, order in product(speeds if shape.speed else (0.0,), (IN_ORDER, SPREAD)):
                tried = replace(shape, speed=speed, order=order)
                before = found.get(id(shape.family), (math.inf, shape))[0]
                worst = self._worst(self._make(tried), before)
                least = min(least, worst)
                if worst < before:
                    found[id(shape.family)] = worst, tried
        for worst, shape in sorted(found.values(), key=lambda each: each[0])[:2]:
            if worst > ENOUGH and self.judge.simulations < most:
                self._climb(shape, self._score, None, most=min(WORK // shape.family.count, 10 * CLIMBED))

    def _look_at_less_on_host(self, here: Shape) -> None:
        """Shapes that leave less to the host than the fastest one: one of them may be as good."""
        for away in _spread(here.family.least_away, here.away, LESS)[:-1].tolist():
            made = self._make(replace(here, away=away, speed=0.0))
            if made is not None:
                self.judge.seconds(made, self._nominal)

    def _worst(self, candidate: Candidate | None, most: float) -> float:
        """The worst regret; infinite above `most`, and for what does not fit."""
        return math.inf if candidate is None else self.judge.regret(candidate, most)

    def _by_regret(self, here: Shape) -> list[tuple[float, Shape]]:
        """Shapes of the best packings by the worst ratio of their floors to the best, in the scenarios at the
        corners."""
        ranked = []
        for family in self._near_families(here):
            grid = _spread(family.least_away, family.most_away, 2 * GRID)
            for blocks in dict.fromkeys((*self._counts(family, few=True), here.blocks)):
                if blocks < family.fewest[0]:
                    continue
                depth = family.depth(blocks)
                for share, early in product((1.0, 0.0), dict.fromkeys((self._early, False))):
                    rows = family.rows(grid, blocks, here.order, share)
                    worst = self._ratios(family, rows, self._corners, depth=depth, early=early)
                    for away, ratio in zip(grid.tolist(), worst.tolist(), strict=True):
                        if ratio < math.inf:
                            shape = Shape(family, away, blocks, depth, here.order, share, speed=float(early))
                            ranked.append((ratio, shape))
        return sorted(ranked, key=lambda each: (each[0], -each[1].depth))

    # --- single chunks ------------------------------------------------------------------------------------------------

    def _look_at_all_of_few(self) -> None:
        """Packings with so few chunks that all placements can be looked at: the best by floors first."""
        at, left = self._nominal, EXACT
        for family in self._all:
            codes = family.every
            if not len(codes):
                continue
            blocks, fits = family.room_for(codes)
            codes, blocks = codes[fits], blocks[fits]
            floors = self.judge.floors(family.model, at, codes, blocks, early=self._early, prefetch=True)
            for row in np.argsort(np.round(floors, 9), kind="stable").tolist():
                if floors[row] >= self.judge.best_s(at) * (1 + 1e-9) or left <= 0:
                    break
                streamed = bool((~RESIDENT[codes[row]]).any())
                for depth in range(len(family.fewest)) if streamed else (0,):
                    for speed in (0.0, 1.0) if self._early else (0.0,):
                        placement = Placement.numbered(codes[row].tolist())
                        found = self._weigh(family.model, placement, int(blocks[row]), depth, speed)
                        if found is not None:
                            left -= 1
                            self.judge.seconds(found, at)

    def _change_best(self, *, robust: bool) -> None:
        """Changes chunks of the best, and of the best of another packing."""
        best = self._best(robust=robust)
        if not robust and self._is_near and len(best.work.chunks) > FEW_CHUNKS:
            return
        score: Score = lambda it, _: self.judge.seconds(it, self._nominal)  # noqa: E731
        most = math.inf
        if robust:
            score, most = self._score, 1 + self.judge.regret(best) + 2 * TIE
        others = [(score(it, most), n, it) for n, it in enumerate(self.judge.fitting) if it.model is not best.model]
        other_s, _, other = min(others, key=lambda each: each[:2], default=(math.inf, 0, best))
        for start in [best] if other_s == math.inf else [best, other]:
            self._change_chunks(start, score, robust=robust)

    def _change_chunks(self, start: Candidate, score: Score, *, robust: bool) -> None:
        """Changes homes, or early updates, of one chunk or two at a time, the most promising by floors first."""
        gathered = start.model.setting.world_size > 1 and all(start.placement.resident)
        family = next((f for f in self._families if f.model is start.model and f.gathered == gathered), None)
        if family is None or family.count > (FEW_CHUNKS if self._robust else 4 * FEW_CHUNKS):
            return
        left = min(WORK // family.count, MOST) // (2 if robust else 1)
        here, best, seen = start, score(start, math.inf), set[Key]()
        while left > 0:
            better = None
            limit = best if robust else best / self.judge.best_s(self._nominal)
            for other in self._changed(family, here, limit, robust=robust):
                if key_of(other) in seen or left <= 0:
                    continue
                seen.add(key_of(other))
                left -= 1
                found = score(other, best)
                if found < best * (1 - (1e-4 if robust else 1e-9)):
                    best, better = found, other
                    break
            if better is None:
                return
            here, best = better, score(better, math.inf)

    def _changed(self, family: Family, here: Candidate, most: float, *, robust: bool) -> Iterator[Candidate]:
        """Candidates that differ in one chunk or two, while their floors over the best known seconds are below `most`
        in each of the scenarios at the corners."""
        few, depth, early = family.count <= FEW_CHUNKS, here.schedule.prefetch_depth, here.placement.early
        if early:
            yield from self._toggled(here)
        plain = here.placement.updated_early(()).codes
        levels = [dict.fromkeys(three) for three in family.levels.tolist()]
        ones = [(c, code) for c, three in enumerate(levels) for code in three if code != plain[c]]
        near = len(ones) if few else 5
        pairs = ((a, b) for i, a in enumerate(ones) for b in ones[i + 1 : i + near] if a[0] != b[0])
        changes = [*((one,) for one in ones), *pairs]
        codes = np.tile(plain, (len(changes), 1))
        for row, change in enumerate(changes):
            for c, code in change:
                codes[row, c] = code
        blocks, fits = family.room_for(codes)
        rows, among = Rows(codes, blocks, fits, np.zeros_like(blocks)), self._corners if robust else [self._nominal]
        ratios = self._ratios(family, rows, among, depth=depth, early=bool(early))
        depths = list(dict.fromkeys((depth, *range(len(family.fewest))))) if few else [depth]
        speeds = (1.0, 0.3, 0.0) if robust else (1.0, 0.0)
        for row in np.argsort(ratios, kind="stable").tolist():
            if ratios[row] > most * (1 - (0 if few else LITTLE)):
                return
            placement = Placement.numbered(codes[row].tolist())
            for ahead in depths:
                for speed in speeds if early else (0.0,):
                    found = self._weigh(family.model, placement, int(blocks[row]), ahead, speed)
                    if found is not None:
                        yield found

    @property
    def _corners(self) -> list[Scenario]:
        """Scenarios in which nothing, or all, is slow."""
        slowest = min(self.judge.scenarios, key=lambda each: (each.host_adam, each.link))
        plain = {replace(each, clipped=False) for each in (slowest, self._nominal)}
        return [each for each in self.judge.scenarios if replace(each, clipped=False) in plain]

    def _ratios(self, family: Family, rows: Rows, among: Iterable[Scenario], *, depth: int, early: bool) -> Floats:
        """The largest ratio of floors to the best known seconds in some scenarios; infinite for what does not fit."""
        found: Floats = np.zeros(len(rows.codes))
        for scenario in among:
            able = early and not scenario.clipped
            floors = self.judge.floors(family.model, scenario, rows.codes, rows.blocks, early=able, prefetch=depth > 0)
            found = np.maximum(found, floors / self.judge.best_s(scenario))
        return np.where(rows.fits, np.round(found, 9), np.inf)

    def _toggled(self, here: Candidate) -> Iterator[Candidate]:
        """The same homes, with one chunk or two neighbours updated early, or after the norm, that are not yet."""
        model, placement = here.model, here.placement
        able = [
            c
            for c, on_device in enumerate(placement.state_on_device)
            if not on_device and model.work.can_update_early(c) and c not in placement.state_on_disk
        ]
        for change in [*((c,) for c in able), *pairwise(able)]:
            early = placement.early.symmetric_difference(change)
            changed = placement.updated_early(early)
            if early and sum(model.host_parts(changed).values()) <= early_host_bytes(model, self._budgets):
                yield replace(here, placement=changed)


def judge_updates(space: SearchSpace, budgets: Budgets, plain: Candidate, scenarios: Sequence[Scenario]) -> Outcome:
    """Judges homes that are given: `plain`, and the same with the early updates that each scenario suggests.

    If the user asked for early updates, any that are faster at the nominal rates rule out `plain`.
    """
    judge, model, asked = Judge(space, scenarios, budgets), plain.model, space.setting.early_updates
    plain_s = judge.seconds(plain, judge.nominal)
    left_bytes = early_host_bytes(model, budgets) - plain.need.host_bytes
    speeds = dict.fromkeys(each.host_adam for each in scenarios if not each.clipped) if asked is not False else ()
    for speed, rule in product(speeds, range(3)):
        early = space.cost.early_chunks(model.work, plain.placement, speed=speed, left_bytes=left_bytes, rule=rule)
        if early:
            judge.seconds(replace(plain, placement=plain.placement.updated_early(early)), judge.nominal)
    if asked and judge.best_s(judge.nominal) < plain_s:
        judge.forget(plain)
    return judge.outcome(judge.surest())


def _spread(low: int, high: int, count: int = GRID) -> Ints:
    """Numbers from `low` to `high`, evenly."""
    found: Ints = np.unique(np.linspace(low, high, count).round().astype(np.int64))
    return found
