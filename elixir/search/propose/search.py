"""The search: floors rank the shapes of all packings, simulations confirm a few, and a climb goes on from the best.

It does this for one aim after the other: the seconds in the nominal scenario, those in each other scenario, and the
worst regret over all scenarios. For each aim

1. `_look` works out the floors of many shapes at once, without a simulation;
2. `_promising` gives candidates to simulate: the best by floors of the pool, and the shapes with the least floors, with
   early updates by several rules;
3. `_climb` goes from the best of these to better ones nearby: first to shapes that differ in one number, then, where
   chunks are few, to homes that differ in one chunk or two.

Whatever was simulated is in one pool (`Judge`), and the plan is the best of the pool.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise, product

import numpy as np

from elixir.hardware.scenario import Scenario
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import RESIDENT, Floats, Ints, Placement
from elixir.search.propose.candidate import Candidate, early_host_bytes, weigh
from elixir.search.propose.family import IN_ORDER, SPREAD, Family, Rows, Shape, families, spread
from elixir.search.propose.judge import DECIMALS, LITTLE, TIE, Aim, Judge, Key, Outcome, key_of, scores_of
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.request import HomeChoice
from elixir.search.simulator.replay import STEADY_BATCH
from elixir.search.simulator.simulated_cost import can_step

GAP, NEAR = 1e-3, 0.01
"""A step this little above the least floor is not improved: in the nominal scenario, and in another one."""
SLOW = 1.05
"""No climb begins this far above the best."""
WORK, BRIEF_WORK, OTHERS = 90_000, 2_500, 4
"""Simulations times chunks and batches for one aim, where many plans are compared, and how many times fewer for the
seconds of a scenario but the nominal one."""
SURE_CHUNKS = 96
"""If a plan has more chunks, simulations for aims other than the nominal seconds are fewer in proportion."""
LESS = 5
"""Shapes that leave less to the host, and the fastest one."""
EXACT = 600
"""Simulations at most for all packings together of which all placements are looked at."""
FEW_CHUNKS, MANY_CHUNKS = 32, 128
"""Most chunks of a packing whose homes change one by one and in all pairs; and most if there is one scenario, then in
pairs of neighbours."""
PACKINGS = 10
"""Packings looked at for aims other than the nominal seconds, next to that of the fastest plan."""
STARTS, KNOWN, PATIENCE = 3, 6, 6
"""Climbs for one aim, candidates of the pool that are compared before, and the part of all simulations after which a
climb ends that finds nothing."""
TOGETHER = 8
"""Neighbours whose floors are worked out together, though the first may be better."""

Near = Callable[[Candidate, "_Tries"], Iterable[Candidate]]
"""Candidates that differ a little from one."""


class ShapeSearch:
    """One search.

    Args:
        space: of the question.
        budgets: memory of device and host.
        sizes: capacities of chunks to pack with.
        scenarios: that are possible, the nominal one first.
        homes: of all chunks, if they are given.
        work: simulations times chunks and batches for one aim.
    """

    def __init__(
        self,
        space: SearchSpace,
        budgets: Budgets,
        sizes: Iterable[int],
        scenarios: Sequence[Scenario],
        homes: HomeChoice = "auto",
        work: int = WORK,
    ) -> None:
        self.space, self._work = space, work
        self._space, self._budgets = space.on(scenarios[0]), budgets
        self.judge = Judge(space, scenarios, budgets)
        self._nominal, setting = scenarios[0], space.setting
        self._early = setting.early_updates is not False and not self._nominal.clipped
        self._all = families(self._space, budgets, sizes, homes)
        self._families = [family for family in self._all if family.least_away <= family.most_away]
        self._tables: dict[tuple[int, bytes, int, tuple[Scenario, ...]], Floats] = {}
        self._shapes: dict[Key, Shape] = {}
        self._weighed: dict[tuple[MemoryModel, Placement, int, int, float, int], Candidate | None] = {}

    def find(self, *, sure: bool = True) -> Outcome | None:
        """Finds the plan with the least worst regret; the fastest in the nominal scenario, if not `sure`. None where
        nothing fits.

        In other scenarios it looks at fewer packings: that of the fastest plan, and those with small nominal floors.
        """
        judge = self.judge
        if self.fastest_s == math.inf:
            return None
        if self._on_cores:
            return judge.outcome(judge.fastest())
        best = judge.fastest()
        if others := judge.scenarios[1:]:
            order = list(dict.fromkeys(shape.family for _, shape in self._looked))
            order.sort(key=lambda family: family.model is not best.model)
            near = order[: PACKINGS + 1]
            # The more chunks there are, the nearer the best shape is to its floor.
            work = self._work * SURE_CHUNKS // max(len(best.work.chunks), SURE_CHUNKS)
            for other in others:
                self._approach({other: 1.0}, self._look(near, {other: 1.0}), NEAR, work // OTHERS)
            self._approach(judge.known, self._look(near, judge.known), TIE / 2, work)
        if sure:
            self._look_at_less_on_host(judge.fastest(self._most(self._work // OTHERS, len(best.work.chunks))))
        return judge.outcome(judge.surest() if sure else judge.fastest())

    @cached_property
    def fastest_s(self) -> float:
        """Seconds of the fastest plan in the nominal scenario; infinite where nothing fits."""
        if not self._on_cores:
            self._approach({self._nominal: 1.0}, self._looked, GAP, self._work)
            self._look_at_all_of_few()
        return self.judge.best_s[self._nominal]

    @cached_property
    def _looked(self) -> list[tuple[float, Shape]]:
        """Shapes with small nominal floors."""
        return self._look(self._families, {self._nominal: 1.0})

    @cached_property
    def _on_cores(self) -> bool:
        """Whether the device is a CPU that holds everything: lanes would only take cores from compute."""
        if self._space.hardware.device_kind == "cpu":
            self._look_at_resident()
        return bool(self.judge.pool)

    def _look_at_less_on_host(self, best: Candidate) -> None:
        """Shapes that leave less to the host than the fastest plan, or nothing: one of them may be as good."""
        self._look_at_resident()
        here = self._shapes.get(key_of(best))
        if here is None:
            return
        for away in spread(here.family.least_away, here.away, LESS)[:-1].tolist():
            if made := self._make(replace(here, away=away, speed=0.0)):
                self.judge.seconds(made, self._nominal)

    def floors(self) -> list[tuple[float, int]]:
        """The least nominal floor of each packing of which something fits, and its capacity; the least first."""
        found = {shape.family.work.packing.capacity_bytes: floor_s for floor_s, shape in reversed(self._looked)}
        return sorted((floor_s, size) for size, floor_s in found.items())

    def _look_at_resident(self) -> None:
        """The placements of all packings that keep everything on the device."""
        for family in self._families:
            made = self._make(Shape(family, 0, family.fewest[0], 0))
            if made is not None and made.placement.keeps_everything:
                self.judge.seconds(made, self._nominal)

    def _approach(self, aim: Aim, looked: Sequence[tuple[float, Shape]], gap: float, work: int) -> None:
        """Simulates the candidates with the least floors, and climbs from the best of them.

        Args:
            aim: what is to be small.
            looked: shapes, the least floor first, and these floors as scores.
            gap: a score this little above the least floor needs no improvement.
            work: simulations times chunks and batches, next to those of the pool.
        """
        judge, tries = self.judge, _Tries(self.judge, aim)
        if not looked:
            for candidate in judge.promising(aim, KNOWN):
                tries.show(candidate)
            return
        enough = looked[0][0] * (1 + gap)
        most = KNOWN * len(aim) + self._most(work, looked[0][1].family.count)
        until = judge.simulations + most
        for candidate in self._promising(looked, tries):
            if tries.best <= enough or judge.simulations > until - most / 2:
                break
            tries.show(candidate)
        for start in tries.starts(lambda it: (id(it.model), it.schedule.blocks, bool(it.placement.early)))[:STARTS]:
            self._climb(start, tries, self._near_shapes, enough, until, most // PATIENCE)
        for start in tries.starts(lambda it: id(it.model))[:2]:
            few = len(start.work.chunks) <= FEW_CHUNKS  # of unlike sizes, so that no shape may be best
            self._climb(start, tries, self._near_chunks, 0.0 if few else enough, until, most // PATIENCE)

    def _most(self, work: int, count: int) -> int:
        """Simulations of so many chunks that are so much work."""
        return work // (max(count, FEW_CHUNKS) * min(self._space.setting.accumulation, STEADY_BATCH + 1))

    def _promising(self, looked: Iterable[tuple[float, Shape]], tries: _Tries) -> Iterator[Candidate]:
        """Candidates of the pool, and others of the shapes with the least floors, until these are above the best."""
        yield from self.judge.promising(tries.aim, KNOWN)
        taken = Counter[int]()
        for floor, shape in looked:
            if floor >= tries.best * (1 - LITTLE):
                return
            if taken[id(shape.family)] < (1 if shape.family.evenly else 2):
                taken[id(shape.family)] += 1
                yield from self._probed(shape, tries.aim)

    # --- shapes -------------------------------------------------------------------------------------------------------

    def _look(self, families: Sequence[Family], aim: Aim) -> list[tuple[float, Shape]]:
        """Shapes with small floors, the least first, each with that floor as a score: the least for each packing and
        number of blocks."""
        first = tuple(aim) == (self._nominal,)
        found: dict[Shape, float] = {}
        for family in families:
            for blocks in self._counts(family, few=not first):
                grid = spread(family.least_away, family.most_away)
                while True:
                    floors = self._of_grid(family, grid, blocks, aim)
                    best = int(np.argmin(floors))
                    if floors[best] == np.inf:
                        break
                    depth = family.depth(blocks)
                    found[Shape(family, int(grid[best]), blocks, depth)] = float(floors[best])
                    low, high = int(grid[max(best - 1, 0)]), int(grid[min(best + 1, len(grid) - 1)])
                    if not first or high - low <= 2:
                        break
                    grid = spread(low, high)
        # Of shapes with about equal floors the one that fetches further ahead is likelier to reach it.
        ranked = sorted(((floor, shape) for shape, floor in found.items()), key=lambda each: (each[0], -each[1].depth))
        enough = ranked[0][0] * (1 + GAP) if ranked else 0.0
        return sorted(ranked, key=lambda each: (each[0] > enough, -each[1].depth if each[0] <= enough else 0))

    def _of_grid(self, family: Family, grid: Ints, blocks: int, aim: Aim) -> Floats:
        """Scores that floors allow with so many states away; those of all scenarios are worked out at once."""
        among = tuple(aim) if tuple(aim) == (self._nominal,) else self.judge.scenarios
        key = id(family), grid.tobytes(), blocks, among
        if key not in self._tables:
            rows = family.rows(grid, blocks)
            self._tables[key] = self._floors(family, rows, among, early=self._early, depth=family.depth(blocks))
        return scores_of(self._tables[key], among, aim)

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

    def _floors(self, family: Family, rows: Rows, among: Sequence[Scenario], *, early: bool, depth: int) -> Floats:
        """Floors by scenario and row; infinite for what does not fit."""
        if not rows.fits.any():
            return np.full((len(among), len(rows.fits)), np.inf)
        found = self.judge.floors(
            family.model, among, rows.codes, rows.blocks, early=early, prefetch=depth > 0, host_bytes=rows.host_bytes
        )
        return np.where(rows.fits, found, np.inf)

    def _probed(self, shape: Shape, aim: Aim) -> Iterator[Candidate]:
        """A shape with weights in both orders and none, and with early updates by different rules."""
        hosts = sorted({each.host_adam for each in aim if not each.clipped}, reverse=True) if self._early else []
        if len(hosts) > 1:
            hosts.insert(1, (hosts[0] * hosts[-1]) ** 0.5)
        ways = [(0.0, 0), *((speed, 0) for speed in hosts)]
        if len(hosts) == 1:
            ways += [(hosts[0], 1), (hosts[0], 2)]
        for speed, rule in ways:
            for order, share in ((IN_ORDER, 1.0), (SPREAD, 1.0), (IN_ORDER, 0.0)):
                if made := self._make(replace(shape, speed=speed, order=order, share=share, rule=rule)):
                    yield made

    def _near_shapes(self, here: Candidate, tries: _Tries) -> Iterator[Candidate]:
        """Candidates whose shapes differ in one number."""
        shape = self._shapes.get(key_of(here))
        for other in self._neighbours(shape, streams=not all(here.placement.resident)) if shape is not None else ():
            if made := self._make(other):
                yield made

    def _neighbours(self, shape: Shape, *, streams: bool) -> Iterator[Shape]:
        family = shape.family
        step = max((family.most_away - family.least_away) // 8, 1)
        while step:
            for away in (shape.away - step, shape.away + step):
                yield replace(shape, away=min(max(away, family.least_away), family.most_away))
            step //= 2
        if shape.speed:
            yield from (replace(shape, rule=rule) for rule in range(3))
            speeds = (shape.speed * factor for factor in (1.15, 1 / 1.15, 1.4, 1 / 1.4, 0.5, 2.0))
            yield from (replace(shape, speed=speed) for speed in speeds if 0.2 <= speed <= 4)
        elif self._early:
            yield replace(shape, speed=1.0)
        if streams:
            yield from self._other_blocks(shape)

    def _other_blocks(self, shape: Shape) -> Iterator[Shape]:
        """The shape with other blocks, fetched less or further ahead, and with other weights on the device."""
        family = shape.family
        for depth in (shape.depth - 1, shape.depth + 1):
            if 0 <= depth < len(family.fewest):
                fewest = family.fewest[depth]
                for blocks in (max(shape.blocks, fewest), fewest):
                    yield replace(shape, depth=depth, blocks=blocks)
        yield replace(shape, order=1 - shape.order)
        yield from (replace(shape, share=share) for share in (0.0, 0.25, 0.5, 0.75, 1.0))
        for blocks in (shape.blocks + 1, 2 * shape.blocks, shape.blocks - 1, shape.blocks // 2):
            if blocks >= family.fewest[0]:
                yield replace(shape, blocks=blocks, depth=min(shape.depth, family.depth(blocks)))

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _make(self, shape: Shape) -> Candidate | None:
        """The candidate of a shape; None if it does not fit."""
        placed = shape.family.placed(shape)
        if placed is None:
            return None
        made = self._weigh(shape.family.model, *placed, shape.depth, shape.speed, shape.rule)
        if made is not None:
            if not made.schedule.blocks:  # what needs some may be near, and fewer leave more room
                depth = min(1, len(shape.family.fewest) - 1)
                shape = replace(shape, depth=depth, blocks=shape.family.fewest[depth])
            self._shapes.setdefault(key_of(made), shape)
        return made

    def _weigh(
        self, model: MemoryModel, placement: Placement, blocks: int, depth: int, speed: float = 0.0, rule: int = 0
    ) -> Candidate | None:
        """The candidate with these homes, with fewer chunks fetched ahead if there are too few blocks; with a
        speed, and chunks updated early that such a host takes. None if it does not fit, or none can be."""
        depth = depth if placement.resident.count(False) else 0
        key = model, placement, blocks, depth, speed, rule
        if key not in self._weighed:
            self._weighed[key] = self._made(*key)
        return self._weighed[key]

    def _made(
        self, model: MemoryModel, placement: Placement, blocks: int, depth: int, speed: float, rule: int
    ) -> Candidate | None:
        fewest = model.work.schedule(placement.residents, depth).min_blocks
        while depth and blocks < fewest:
            depth -= 1
            fewest = model.work.schedule(placement.residents, depth).min_blocks
        if blocks < fewest:
            return None
        found = weigh(model, placement, blocks if fewest else 0, depth, self._space.cost)
        if found.need.host_bytes > self._budgets.host_bytes or not speed:
            return found if found.need.host_bytes <= self._budgets.host_bytes else None
        left_bytes = early_host_bytes(model, self._budgets) - found.need.host_bytes
        early = self._space.cost.early_chunks(model, found.placement, speed=speed, left_bytes=left_bytes, rule=rule)
        return replace(found, placement=found.placement.updated_early(early)) if early else None

    def _climb(self, start: Candidate, tries: _Tries, near: Near, enough: float, until: int, patience: int) -> None:
        """Goes to the first candidate nearby that is better, again and again.

        Args:
            start: where it begins.
            tries: with the aim.
            near: candidates that differ a little from one.
            enough: a score that needs no improvement.
            until: number of simulations at which it ends.
            patience: simulations after which it ends if none was better.
        """
        here: Candidate | None = start
        best, seen = tries.scores[key_of(start)], set[Key]()
        if best > tries.best * SLOW:
            return
        while here is not None and tries.best > enough:
            at, here, most = here, None, min(until, self.judge.simulations + patience)
            for other in self._with_bounds(near(at, tries), tries.aim):
                if self.judge.simulations >= most:
                    return
                key = key_of(other)
                if key in seen:
                    continue
                seen.add(key)
                score = tries.show(other, best * (1 - LITTLE))
                if score < best * (1 - LITTLE):
                    here, best = other, score
                    break

    def _with_bounds(self, some: Iterable[Candidate], aim: Aim) -> Iterator[Candidate]:
        """The same candidates, whose floors are worked out for several at once."""
        rest = iter(some)
        while batch := list(islice(rest, TOGETHER)):
            self.judge.bounds(batch, tuple(aim))
            yield from batch

    # --- single chunks ------------------------------------------------------------------------------------------------

    def _look_at_all_of_few(self) -> None:
        """Goes through all placements of packings with few chunks, the least floors first."""
        at, left = self._nominal, min(EXACT, self._work // FEW_CHUNKS)
        for family in self._all:
            codes = family.every
            if not len(codes):
                continue
            blocks, fits = family.room_for(codes)
            codes, blocks = codes[fits], blocks[fits]
            floors = self.judge.floors(family.model, (at,), codes, blocks, early=self._early, prefetch=True)[0]
            for row in np.argsort(floors.round(DECIMALS), kind="stable").tolist():
                if floors[row] >= self.judge.best_s[at] * (1 + 1e-9) or left <= 0:
                    break
                streamed = bool((~RESIDENT[codes[row]]).any())
                for depth in range(len(family.fewest)) if streamed else (0,):
                    for speed in (0.0, 1.0) if self._early else (0.0,):
                        placement = Placement.numbered(codes[row].tolist())
                        if found := self._weigh(family.model, placement, int(blocks[row]), depth, speed):
                            left -= 1
                            self.judge.seconds(found, at)

    def _near_chunks(self, here: Candidate, tries: _Tries) -> Iterator[Candidate]:
        """Candidates that differ in the home or the update of one chunk, or of two, the least floors first."""
        gathered = here.model.setting.world_size > 1 and all(here.placement.resident)
        family = next((f for f in self._families if f.model is here.model and f.gathered == gathered), None)
        if family is None or family.count > (MANY_CHUNKS if len(self.judge.scenarios) == 1 else FEW_CHUNKS):
            return
        few = family.count <= FEW_CHUNKS
        early = self._early and (few or bool(here.placement.early))
        yield from self._toggled(here)
        plain = here.placement.updated_early(()).codes
        levels = [dict.fromkeys(three) for three in family.levels.tolist()]
        ones = [(c, code) for c, three in enumerate(levels) for code in three if code != plain[c]]
        reach = len(ones) if few else 5
        pairs = ((a, b) for i, a in enumerate(ones) for b in ones[i + 1 : i + reach] if a[0] != b[0])
        changes = [*((one,) for one in ones), *pairs]
        codes = np.tile(plain, (len(changes), 1))
        for row, change in enumerate(changes):
            for c, code in change:
                codes[row, c] = code
        blocks, fits = family.room_for(codes)
        depth, best = here.schedule.prefetch_depth, tries.scores[key_of(here)]
        rows = Rows(codes, blocks, fits, np.zeros_like(blocks))
        among = tuple(tries.aim)
        floors = scores_of(self._floors(family, rows, among, early=early, depth=depth), among, tries.aim)
        depths = dict.fromkeys((depth, *range(len(family.fewest)))) if few else (depth,)
        speeds = dict.fromkeys((1.0, min(each.host_adam for each in tries.aim), 0.0)) if early else (0.0,)
        for row in np.argsort(floors, kind="stable").tolist():
            if floors[row] > best * (1 - LITTLE):
                return
            placement = Placement.numbered(codes[row].tolist())
            for ahead, speed in product(depths, speeds):
                if found := self._weigh(family.model, placement, int(blocks[row]), ahead, speed):
                    yield found

    def _toggled(self, here: Candidate) -> Iterator[Candidate]:
        """The same homes, with one chunk or two neighbours updated early, or after the norm, that are not yet."""
        model, placement = here.model, here.placement
        able = sorted(can_step(model.work, placement) - placement.state_on_disk)
        for change in [*((c,) for c in able), *pairwise(able)] if placement.early else ():
            early = placement.early.symmetric_difference(change)
            changed = placement.updated_early(early)
            if early and sum(model.host_parts(changed).values()) <= early_host_bytes(model, self._budgets):
                yield replace(here, placement=changed)


class _Tries:
    """Candidates that were compared for one aim."""

    def __init__(self, judge: Judge, aim: Aim) -> None:
        self.aim, self._judge = aim, judge
        self.best = math.inf
        """The least score."""
        self.scores: dict[Key, float] = {}
        self._candidates: list[Candidate] = []

    def show(self, candidate: Candidate, most: float = math.inf) -> float:
        """Scores a candidate; infinite for what is slow, or above `most`."""
        key = key_of(candidate)
        score = self._judge.score(candidate, self.aim, min(most, self.best * SLOW))
        if score < self.scores.get(key, math.inf):
            self.scores[key] = score
            self._candidates.append(candidate)
            self.best = min(self.best, score)
        return score

    def starts(self, kind: Callable[[Candidate], object]) -> list[Candidate]:
        """The best candidate of each kind; the one with the least score comes first."""
        found: dict[object, Candidate] = {}
        for candidate in sorted(self._candidates, key=lambda it: self.scores[key_of(it)]):
            found.setdefault(kind(candidate), candidate)
        return list(found.values())


def judge_updates(space: SearchSpace, budgets: Budgets, plain: Candidate, scenarios: Sequence[Scenario]) -> Outcome:
    """Judges homes that are given: `plain`, and the same with the early updates that each scenario suggests.

    If the user asked for early updates, any that are faster at the nominal rates rule out `plain`.
    """
    judge, model, asked = Judge(space, scenarios, budgets), plain.model, space.setting.early_updates
    plain_s = judge.seconds(plain, judge.nominal)
    left_bytes = early_host_bytes(model, budgets) - plain.need.host_bytes
    speeds = dict.fromkeys(each.host_adam for each in scenarios if not each.clipped) if asked is not False else ()
    for speed, rule in product(speeds, range(3)):
        early = space.cost.early_chunks(model, plain.placement, speed=speed, left_bytes=left_bytes, rule=rule)
        if early:
            judge.seconds(replace(plain, placement=plain.placement.updated_early(early)), judge.nominal)
    if asked and judge.best_s[judge.nominal] < plain_s:
        del judge.pool[key_of(plain)]
    return judge.outcome(judge.surest())
