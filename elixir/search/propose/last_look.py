"""A last look at a plan with few chunks: each moved elsewhere, and each with its new states made at another time.

Fillings move chunks by a rule, and which of them speculate follows from a rule, too. With few chunks each is a large
part of the step, so that one for which a rule chooses badly is worth percents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from elixir.search.problem import Placement
from elixir.search.propose.candidate import Candidate, early_host_bytes, updated_early, weigh
from elixir.search.propose.local_search import DECIMALS
from elixir.search.propose.placement_batch import Variants
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.simulator import SimulatedCost, can_step

MOST_LOOKS = 100
"""Neighbours that are simulated, at most."""
LITTLE_LESS = 1 - 2e-4
"""Neighbours that cannot be better by so much are not simulated."""
Key = Callable[[Candidate], tuple[float, ...]]


def moved_while_better(
    space: SearchSpace, budgets: Budgets, start: Candidate, depth: int, key: Key, cost: SimulatedCost
) -> Candidate:
    """`start`, with one chunk after the other changed for as long as `key` gets less.

    Args:
        space: what is searched.
        budgets: what a plan may use.
        start: where to begin. If no chunk is updated early, none will be.
        depth: chunks fetched ahead where `start` streams none.
        key: seconds by `cost`, then what decides between equals; infinite seconds for what is out of the question.
        cost: that of `space`, or of the same machine with a slower host.
    """
    neighbours = _Neighbours(space, budgets, start, depth, cost)
    better: Candidate | None = start
    while better is not None:
        start, better = better, neighbours.first_better(better, key)
    return start


class _Neighbours:
    def __init__(self, space: SearchSpace, budgets: Budgets, start: Candidate, depth: int, cost: SimulatedCost) -> None:
        self._space, self._budgets, self._cost = space, budgets, cost
        self._model = space.model(start.work.packing.capacity_bytes)
        gathered = space.setting.world_size > 1 and all(start.placement.resident)
        self._variants = Variants(self._model, cost, gathered=gathered)
        self._depth = start.schedule.prefetch_depth if start.schedule.blocks else depth
        self._early = bool(start.placement.early)
        self._seen = {start.placement}

    def first_better(self, here: Candidate, key: Key) -> Candidate | None:
        """One that is better than `here`; None if there is none, or enough was looked at."""
        least = key(here)
        found = itertools.chain(self._updated_otherwise(here, least[0]), self._elsewhere(here, least[0]))
        return next((candidate for candidate in found if key(candidate) < least), None)

    def _elsewhere(self, here: Candidate, most_s: float) -> Iterator[Candidate]:
        """One chunk in another home, and as many blocks as fit; the most promising come first."""
        codes = self._variants.codes(here.placement.updated_early(()))
        if codes is None:
            return
        near = self._variants.neighbours(codes)
        look = self._variants.look(near, self._budgets.device_bytes, early=self._early)
        fits = (look.blocks >= 0) & (look.host_bytes <= self._budgets.host_bytes)
        rows = np.flatnonzero(fits & (look.floor_s <= most_s * LITTLE_LESS))
        for row in rows[np.argsort(np.round(look.floor_s[rows], DECIMALS), kind="stable")].tolist():
            placement = Placement.numbered(near[row].tolist())
            fewest = self._model.work.schedule(placement.residents, self._depth).min_blocks
            if fewest <= look.blocks[row] and self._is_new(placement):
                found = self._weighed(placement, int(look.blocks[row]) if fewest else 0)
                if found is not None:
                    yield found

    def _weighed(self, placement: Placement, blocks: int) -> Candidate | None:
        if self._early:
            return updated_early(self._model, placement, blocks, self._depth, self._space.cost, self._budgets)
        return weigh(self._model, placement, blocks, self._depth, self._space.cost)

    def _updated_otherwise(self, here: Candidate, most_s: float) -> Iterator[Candidate]:
        """One chunk more that is updated early, one fewer, or its neighbour instead."""
        work, placement, now = here.work, here.placement, here.placement.early
        blocks, depth = here.schedule.blocks, here.schedule.prefetch_depth
        if not now or self._cost.floor_of(work, placement, blocks, early=True) >= most_s * LITTLE_LESS:
            return
        able = sorted(can_step(work, placement) - placement.state_on_disk)
        most_bytes = early_host_bytes(self._model, self._budgets)
        for change in [*((chunk,) for chunk in able), *itertools.pairwise(able)]:
            early = now.symmetric_difference(change)
            changed = placement.updated_early(early)
            fits = sum(self._model.host_parts(changed).values()) <= most_bytes
            if early and fits and len(early) - len(now) in (-1, 0, 1) and self._is_new(changed):
                yield weigh(self._model, changed, blocks, depth, self._space.cost)

    def _is_new(self, placement: Placement) -> bool:
        """Whether it is yet to be looked at, and may be."""
        if placement in self._seen or len(self._seen) > MOST_LOOKS:
            return False
        self._seen.add(placement)
        return True
