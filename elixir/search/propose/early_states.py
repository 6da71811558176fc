"""How much of the step a host gets that makes new states in backward.

If updates wait for the norm, what the host steps holds up the next forward, so a search gives the device all it holds.
Backward hides updates that need not wait, and then fewer states on the device may make a shorter step: the host works
next to the device and not before it. Seconds by the number of chunks whose states the host has fall, until backward
hides no more, and rise: the least of them is found in few looks, on any packing and with any blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from elixir.plan import Home
from elixir.search.problem import HOMES, RESIDENT, STATES, WEIGHTS, MemoryModel, Placement
from elixir.search.propose.candidate import Candidate, updated_early
from elixir.search.propose.fillings import Fillings
from elixir.search.propose.local_search import DECIMALS, EXACTLY
from elixir.search.propose.sizes import Budgets, SearchSpace

Key = tuple[int, int, int]
"""Chunks whose states the host has at least, least blocks, depth of prefetch."""
_ON_DEVICE, _STATES_AWAY, _EARLY = map(HOMES.index, (Home.RESIDENT, Home.RESIDENT_HOST, Home.RESIDENT_EARLY))
LESS_FULL = 0.75
"""Part of the device that is filled at last. New weights return to those that it holds, over the link that gradients
need: a chunk that is fetched when it is used may be quicker."""
FIRST_STEP = 16
"""The first change of the number of chunks is one of so many parts of them."""


class EarlyStates:
    """Candidates of one packing whose host makes new states in backward.

    Args:
        space: what is searched.
        model: memory of the packing.
        fillings: of the packing.
        budgets: what a plan may use.
    """

    def __init__(self, space: SearchSpace, model: MemoryModel, fillings: Fillings, budgets: Budgets) -> None:
        self.space, self.model, self._fillings, self._budgets = space, model, fillings, budgets
        self.most = len(fillings.update_order)
        self.best: tuple[Key, Candidate] | None = None
        self._starts: list[Key] = []
        self._least = 0  # chunks whose states the device cannot hold
        self._promising = 0  # chunks with which seconds have the least floor
        self._known: dict[tuple[Placement, int, int], Candidate | None] = {}

    @property
    def best_s(self) -> float:
        """Seconds of the best so far."""
        return math.inf if self.best is None else self.best[1].seconds["total"]

    def look(self, depth: int, shallowest: int) -> float:
        """Begin with the number of chunks that is most promising; seconds that no step of these beats.

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
        host_bytes = np.sum(list(self.model.host(codes).values()), axis=0)
        fit = host_bytes <= self._budgets.host_bytes
        if not fit.any():
            return math.inf
        homes, none = (RESIDENT[codes], WEIGHTS[codes], STATES[codes]), np.zeros(len(counts), dtype=np.int64)
        floors_s = self.space.cost.floor_s(work, np.arange(len(work.chunks)), *homes, none, early=True)
        least = int(np.argmin(np.where(fit, np.round(floors_s, DECIMALS), np.inf)))
        self._promising = int(counts[least])
        early_bytes = np.sum(list(self.model.host(np.where(STATES[codes], codes, _EARLY)).values()), axis=0)
        whole = np.flatnonzero(early_bytes <= self._budgets.host_bytes - self.model.copies_bytes)
        starts = {least, min(least, int(whole[-1]) if len(whole) else 0)}
        blocks = self._fillings.block_range(depth).start
        self._starts = [(int(counts[start]), blocks, depth) for start in sorted(starts)]
        return float(floors_s[least])

    def begin(self, depths: Sequence[int], most_s: float) -> None:
        """The most promising number of chunks, or, if the host cannot hold their weights as well, the nearest to it;
        and the largest with which all of them can speculate.

        What streams is fetched as far ahead as `depths` allow, too. If the device cannot hold as many states as is
        promising, it gets no more blocks than the least of `depths` takes, too.
        """
        shallowest, deepest = depths[0], depths[-1]
        for hosted, blocks, depth in self._starts:
            if not self._fits_host((hosted, blocks, depth)):
                low = 0
                while hosted - low > 1:
                    middle = (low + hosted) // 2
                    fits = self._fits_host((middle, blocks, depth))
                    low, hosted = (middle, hosted) if fits else (low, middle)
                hosted = low
            found = self.at((hosted, blocks, depth), most_s)
            if found is not None and found.schedule.blocks and depth < deepest:
                self.at((hosted, max(blocks, self._fillings.block_range(deepest).start), deepest), most_s)
            choice = self._fillings.hosting(hosted, blocks, depth)
            if depth > shallowest and (choice is None or self._hosted(choice[0]) > hosted):
                self.at((hosted, self._fillings.block_range(shallowest).start, shallowest), most_s)

    def _fits_host(self, key: Key) -> bool:
        choice = self._fillings.hosting(*key)
        return choice is not None and sum(self.model.host_parts(choice[0]).values()) <= self._budgets.host_bytes

    def vary(self, depths: Sequence[int], most_s: float) -> None:
        """From the best so far, other numbers of chunks in ever smaller steps; then the next depths, and more blocks.

        If its floor is above `most_s`, from the nearest number that may take less.
        """
        if self.best is None:
            return
        here = self.best[0]
        found: Candidate | None = self.best[1]
        if self._floor_s(here) > most_s:
            here = self._nearest_below(here, most_s)
            if self._floor_s(here) > most_s:
                return
            found = self.at(here, most_s)
        step = max(self.most // FIRST_STEP, 1)
        while step:
            hosted, blocks, depth = here
            moved = self._better(((count, blocks, depth) for count in (hosted - step, hosted + step)), found, most_s)
            if step == 1 and moved is None:
                near = [other for other in (depth - 1, depth + 1) if other in depths]
                around = [(hosted, max(blocks, self._fillings.block_range(other).start), other) for other in near]
                moved = self._better([*around, (hosted, 2 * blocks, depth)], found, most_s)
            if moved is None:
                step //= 2
            else:
                here, found = moved

    def fill_less(self) -> None:
        """From the best, with `LESS_FULL` of the device filled, if new weights return to some of what it holds."""
        if self.best is not None and any(home.returns for home in self.best[1].placement.homes):
            self.at(self.best[0], self.best_s, LESS_FULL)

    def _better(self, keys: Iterable[Key], than: Candidate | None, most_s: float) -> tuple[Key, Candidate] | None:
        """The best of these that is better."""
        best: tuple[Key, Candidate] | None = None
        for key in keys:
            found = self.at(key, min(most_s, self.best_s)) if self._least <= key[0] <= self.most else None
            known = than if best is None else best[1]
            if found is not None and (known is None or found.sort_key < known.sort_key):
                best = (self._hosted(found.placement), *key[1:]), found
        return best

    def _nearest_below(self, key: Key, most_s: float) -> Key:
        """With the nearest number of chunks that has a floor of at most `most_s`, towards the one with the least."""
        above, below = key[0], self._promising
        while abs(below - above) > 1:
            middle = (below + above) // 2
            if self._floor_s((middle, *key[1:])) > most_s:
                above = middle
            else:
                below = middle
        return (below, *key[1:])

    def _floor_s(self, key: Key) -> float:
        choice = self._fillings.hosting(*key)
        if choice is None:
            return math.inf
        return self.space.cost.floor_of(self.model.work, *choice, early=True)

    def found(self) -> list[Candidate]:
        """All that were simulated."""
        return [candidate for candidate in self._known.values() if candidate is not None]

    def fewest(self) -> Iterable[Candidate]:
        """Down from the best, fewer chunks for the host, for as long as they take no longer."""
        if self.best is None:
            return
        (hosted, blocks, depth), best = self.best
        low, high, most_s = self._least - 1, hosted, best.seconds["total"]
        while high - low > 1:
            middle = (low + high) // 2
            found = self.at((middle, blocks, depth), most_s)
            if found is not None and found.seconds["total"] <= most_s:
                high = middle
                yield found
            else:
                low = middle

    def at(self, key: Key, most_s: float, part: float = 1.0) -> Candidate | None:
        """The candidate with `part` of the device filled; None if it does not fit, if no chunk can be updated early, or
        maybe if it takes longer than `most_s`."""
        choice = self._fillings.hosting(*key, part)
        found = None if choice is None else self._weighed(*choice, key[2], most_s)
        if found is not None and (self.best is None or found.sort_key < self.best[1].sort_key):
            self.best = (self._hosted(found.placement), *key[1:]), found
        return found

    def _hosted(self, placement: Placement) -> int:
        """Chunks whose states the host has."""
        on_device = placement.state_on_device
        return sum(not on_device[chunk] for chunk in self._fillings.update_order)

    def _weighed(self, placement: Placement, blocks: int, depth: int, most_s: float) -> Candidate | None:
        key = placement, blocks, depth if placement.resident.count(False) else 0
        if key not in self._known:
            if self.space.cost.floor_of(self.model.work, placement, blocks, early=True) > most_s * EXACTLY:
                return None
            self._known[key] = updated_early(self.model, *key, self.space.cost, self._budgets)
        return self._known[key]
