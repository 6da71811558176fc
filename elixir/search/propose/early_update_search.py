"""How much of the step a host gets that updates chunks early.

If updates wait for the norm, what the host steps holds up the next forward, so a search gives the device all it holds.
Backward hides updates that need not wait, and then fewer states on the device may make a shorter step: the host works
next to the device and not before it. Seconds by the number of chunks whose states the host has fall, until backward
hides no more, and rise: the least of them is found in few looks, on any packing and with any blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from elixir.plan.chunk_plan import Home
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import HOMES, STATES, Placement
from elixir.search.propose.candidate import Candidate, Found, early_host_bytes, updated_early, weigh
from elixir.search.propose.climb import DECIMALS, EXACTLY, LESS_FULL, NEAR, climb, farthest, halved
from elixir.search.propose.fillings import Fillings
from elixir.search.propose.sizes import Budgets
from elixir.search.simulator.simulated_cost import SimulatedCost

Choice = tuple[int, int, int]
"""Chunks whose states the host has at least, least blocks, depth of prefetch."""
_ON_DEVICE, _STATES_AWAY, _EARLY = map(HOMES.index, (Home.RESIDENT, Home.RESIDENT_HOST, Home.RESIDENT_EARLY))
FIRST_STEP = 16
"""The first change of the number of chunks is one of so many parts of them."""


class EarlyUpdateSearch:
    """Candidates of one packing whose host updates chunks early.

    Args:
        model: memory of the packing.
        fillings: of the packing.
        budgets: what a plan may use.
        cost: the time model.
        found: takes the candidates.
    """

    def __init__(
        self, model: MemoryModel, fillings: Fillings, budgets: Budgets, cost: SimulatedCost, found: Found
    ) -> None:
        self.model, self._fillings, self._budgets, self._cost, self._found = model, fillings, budgets, cost, found
        self.most = len(fillings.update_order)
        self.best: tuple[Choice, Candidate] | None = None
        self._starts: list[Choice] = []
        self._least = 0  # chunks whose states the device cannot hold
        self._promising = 0  # chunks with which seconds have the least floor
        self._known: dict[tuple[Placement, int, int], Candidate | None] = {}

    @property
    def best_s(self) -> float:
        """Seconds of the best so far."""
        return math.inf if self.best is None else self.best[1].seconds["total"]

    def look(self, depth: int, shallowest: int) -> float:
        """Finds the number of chunks that is most promising; seconds that no step of these beats.

        Args:
            depth: chunks fetched ahead to begin with.
            shallowest: the fewest to be fetched ahead, with which the device holds most.
        """
        fullest = self._fillings.hosting(0, self._fillings.block_range(shallowest).start, shallowest)
        if fullest is None or not self.most:
            return math.inf
        work, order = self.model.work, self._fillings.update_order
        self._least = self._hosted(fullest[0])
        counts = np.arange(self._least, self.most + 1)
        # With all weights on the device, whether they fit or not, no step takes longer and no host needs more.
        codes = np.full((len(counts), len(work.chunks)), _ON_DEVICE, dtype=np.int8)
        codes[:, order] = np.where(np.arange(self.most) >= self.most - counts[:, None], _STATES_AWAY, _ON_DEVICE)
        fit = self.model.host_bytes(codes) <= self._budgets.host_bytes
        if not fit.any():
            return math.inf
        none = np.zeros(len(counts), dtype=np.int64)
        floors_s = self._cost.lower_bound_s(work, np.arange(len(work.chunks)), codes, none, early=True)
        least = int(np.argmin(np.where(fit, np.round(floors_s, DECIMALS), np.inf)))
        self._promising = int(counts[least])
        early_bytes = self.model.host_bytes(np.where(STATES[codes], codes, _EARLY))
        whole = np.flatnonzero(early_bytes <= early_host_bytes(self.model, self._budgets))
        starts = {least, min(least, int(whole[-1]) if len(whole) else 0)}
        blocks = self._fillings.block_range(depth).start
        self._starts = [(int(counts[start]), blocks, depth) for start in sorted(starts)]
        return float(floors_s[least])

    def begin(self, depths: Sequence[int]) -> None:
        """Tries the most promising number of chunks, or, if the host cannot hold their weights as well, the nearest to
        it; and the largest with which all of them can be updated early.

        What streams is fetched as far ahead as `depths` allow, too. If the device cannot hold as many states as is
        promising, it gets no more blocks than the least of `depths` takes, too.
        """
        shallowest, deepest = depths[0], depths[-1]
        for start, blocks, depth in self._starts:
            fits = partial(self._fits_host, blocks, depth)
            hosted = start if fits(start) else farthest(0, start, fits)
            found = self._at((hosted, blocks, depth), NEAR)
            if found is not None and found.schedule.blocks and depth < deepest:
                self._at((hosted, max(blocks, self._fillings.block_range(deepest).start), deepest), NEAR)
            choice = self._fillings.hosting(hosted, blocks, depth)
            if depth > shallowest and (choice is None or self._hosted(choice[0]) > hosted):
                self._at((hosted, self._fillings.block_range(shallowest).start, shallowest), NEAR)

    def _fits_host(self, blocks: int, depth: int, hosted: int) -> bool:
        homes = self._fillings.hosting(hosted, blocks, depth)
        return homes is not None and sum(self.model.host_parts(homes[0]).values()) <= self._budgets.host_bytes

    def vary(self, depths: Sequence[int]) -> None:
        """Tries other numbers of chunks from the best so far, in ever smaller steps; then the next depths, and more
        blocks.

        If its floor is above the seconds of the best of all, it begins at the nearest number that may take less.
        """
        if self.best is None:
            return
        (hosted, blocks, depth), found = self.best
        most_s, start = self._found.best_s, hosted
        if self._floor_s((hosted, blocks, depth)) > most_s:
            start = farthest(self._promising, hosted, lambda n: self._floor_s((n, blocks, depth)) <= most_s)
            if self._floor_s((start, blocks, depth)) > most_s:
                return
        here = (start, blocks, depth), found if start == hosted else self._at((start, blocks, depth))
        for step in halved(max(self.most // FIRST_STEP, 1)):
            here = climb(here, partial(self._around, depths=depths, step=step), _key, steepest=step > 1)

    def _around(self, here: _Tried, _most_s: float, *, depths: Sequence[int], step: int) -> Iterator[_Tried]:
        """Other numbers of chunks; with the least step, also the next depths, and more blocks."""
        hosted, blocks, depth = here[0]
        counts = (count for count in (hosted - step, hosted + step) if self._least <= count <= self.most)
        choices = [(count, blocks, depth) for count in counts]
        if step == 1:
            near = [other for other in (depth - 1, depth + 1) if other in depths]
            choices += [(hosted, max(blocks, self._fillings.block_range(other).start), other) for other in near]
            choices.append((hosted, 2 * blocks, depth))
        for choice in choices:
            found = self._at(choice)
            if found is not None:
                yield (self._hosted(found.placement), *choice[1:]), found

    def fill_less(self) -> None:
        """Tries `LESS_FULL` of the device, from the best, if new weights return to some of what it holds; then fewer
        states on the host for as long as that takes no longer."""
        if self.best is None:
            return
        if any(home.returns for home in self.best[1].placement.homes):
            self._at(self.best[0], part=LESS_FULL)
        (hosted, blocks, depth), best = self.best

        def as_fast(count: int) -> bool:
            found = self._at((count, blocks, depth))
            return found is not None and found.seconds["total"] <= best.seconds["total"]

        farthest(hosted, self._least - 1, as_fast)

    def _floor_s(self, choice: Choice) -> float:
        homes = self._fillings.hosting(*choice)
        return math.inf if homes is None else self._cost.lower_bound_of(self.model.work, *homes, early=True)

    def _at(self, choice: Choice, share: float = 1.0, part: float = 1.0) -> Candidate | None:
        """The candidate with `part` of the device filled; None if it does not fit, if no chunk can be updated early, or
        maybe if it takes more than `share` of the seconds of the best of all."""
        homes = self._fillings.hosting(*choice, part)
        if homes is None:
            return None
        key = *homes, choice[2] if homes[0].resident.count(False) else 0
        if key not in self._known:
            if self._cost.lower_bound_of(self.model.work, *homes, early=True) > self._found.best_s * share * EXACTLY:
                return None
            self._known[key] = updated_early(weigh(self.model, *key, self._cost), self._budgets)
        found = self._known[key]
        if found is not None:
            self._found.take([found])
            if self.best is None or found.sort_key < self.best[1].sort_key:
                self.best = (self._hosted(found.placement), *choice[1:]), found
        return found

    def _hosted(self, placement: Placement) -> int:
        """Chunks whose states the host has."""
        on_device = placement.state_on_device
        return sum(not on_device[chunk] for chunk in self._fillings.update_order)


_Tried = tuple[Choice, Candidate | None]


def _key(tried: _Tried) -> tuple[float, ...]:
    return (math.inf,) if tried[1] is None else tried[1].sort_key
