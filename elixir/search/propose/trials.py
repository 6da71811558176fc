"""All that is tried with one packing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Placement
from elixir.search.propose.candidate import Candidate, Found, everything_resident
from elixir.search.propose.climb import EXACTLY, NEAR, ROUNDING_S, Key, climb, halved
from elixir.search.propose.early_update_search import EarlyUpdateSearch
from elixir.search.propose.fillings import Fillings
from elixir.search.propose.local_search import LocalSearch
from elixir.search.propose.sizes import Budgets
from elixir.search.simulator.simulated_cost import SimulatedCost
from elixir.units import LARGEST_BYTES

FEW_CHUNKS = 16
"""Up to so many, all homes are looked at unless they are too many in spite of what can be ruled out."""
STARTS = 8
"""Starting points of the search over homes of few chunks; one with more."""
Choice = tuple[int, int]
"""Blocks, depth of prefetch."""


class Trials:
    """Tries fillings and homes of one packing.

    Args:
        model: memory of the packing.
        budgets: what a plan may use.
        cost: the time model.
        found: takes the candidates.
    """

    def __init__(self, model: MemoryModel, budgets: Budgets, cost: SimulatedCost, found: Found) -> None:
        self.model, self.budgets, self.cost, self.found = model, budgets, cost, found
        self.few_chunks = len(model.work.chunks) <= FEW_CHUNKS
        self.best: Candidate | None = None
        """The best that updates all chunks after the norm."""
        self.least_host_bytes = LARGEST_BYTES
        """Least host need of those that fit the device so far."""
        self._tried: dict[Choice, Candidate | None] = {}
        self._fillings = Fillings(model, budgets.device_bytes, cost)
        self.early = EarlyUpdateSearch(model, self._fillings, budgets, cost, found)

    def least_s(self) -> float:
        """Seconds of its best step, with early updates or without."""
        return min(self.early.best_s, math.inf if self.best is None else self.best.seconds["total"])

    def order(self) -> Key:
        """Puts the packing with the best candidate first; those without any that fits come last."""
        return (math.inf,) if self.best is None else self.best.sort_key

    def depth(self, otherwise: int) -> int:
        """The depth of prefetch with which it is best so far."""
        streams = self.best is not None and not all(self.best.placement.resident)
        return self.best.schedule.prefetch_depth if self.best is not None and streams else otherwise

    def keep_everything(self) -> None:
        """Keeps everything on the device, if it fits."""
        resident = everything_resident(self.model, self.budgets.device_bytes, self.cost)
        self._take([] if resident is None else [resident])

    def fill(self, depths: Sequence[int]) -> None:
        """Fills the device with fewest and most blocks."""
        self.keep_everything()
        # The least prefetch comes last, as what the others take often rules it out; of equals it is the first.
        for depth in (*depths[1:], depths[0]):
            counts = self._fillings.block_range(depth)
            for blocks in sorted({counts.start, counts.stop - 1}):
                self._key((blocks, depth))
        self._tried = dict(sorted(self._tried.items(), key=lambda tried: tried[0][::-1]))

    def vary(self, depths: range) -> None:
        """Tries other depths and block counts in turn from the best so far, in ever smaller steps."""
        here = min((choice for choice, tried in self._tried.items() if tried), key=self._key, default=None)
        if here is None:
            return
        most = self._fillings.block_range(here[1]).stop - 1
        for step in halved(max(most // 4, 1)):
            others = depths if step > 1 or most < 4 else range(0)
            here = climb(here, partial(_around, step=step, most=most, depths=others), self._key, steepest=True)

    def place(self, depths: range, *, closely: bool) -> None:
        """Searches homes of chunks: all of them with few chunks; `closely`, from the best so far."""
        if self.found.best is None or not (self.few_chunks or closely):
            return
        for gathered in self._families():
            local = LocalSearch(self.model, self.budgets, self.cost, gathered=gathered)
            if closely:
                self._take_any(local.better(self._starts(), depths, all_on_host=self.few_chunks))
            if self.few_chunks:
                self._take_any(local.all(self.found.best, depths))

    def _families(self) -> tuple[bool, ...]:
        """Whether all chunks are resident, or none need be: with several ranks a plan is either."""
        if self.model.setting.world_size == 1:
            return (False,)
        if self.few_chunks:
            return (False, True)
        return (self.best is not None and all(self.best.placement.resident),)

    def _starts(self) -> list[Candidate]:
        """The best with each depth and with each block count, the best of them first."""
        by_choice: dict[tuple[str, int], Candidate] = {}
        for (blocks, depth), tried in self._tried.items():
            if tried is None:
                continue
            for choice in (("depth", depth), ("blocks", blocks)):
                by_choice[choice] = min(by_choice.get(choice, tried), tried, key=lambda candidate: candidate.sort_key)
        distinct: dict[Placement, Candidate] = {}
        for candidate in sorted(by_choice.values(), key=lambda candidate: candidate.sort_key):
            distinct.setdefault(candidate.placement, candidate)
        return list(distinct.values())[: STARTS if self.few_chunks else 1]

    def spare_host(self, depth: int) -> None:
        """Tries the homes that need least of the host, where all can be looked at."""
        if self.few_chunks:
            local = LocalSearch(self.model, self.budgets, self.cost)
            self._take_any(local.least_host(depth, self.found.most_host_bytes))

    def _key(self, choice: Choice) -> Key:
        """Puts choices in order; a choice is tried when its key is asked for first."""
        if choice not in self._tried:
            found = self._fillings.at(*choice, self._most_s(), self.found.most_host_bytes)
            self._tried[choice] = self._take(found)
        tried = self._tried[choice]
        return (math.inf,) if tried is None else tried.sort_key

    def _most_s(self) -> float:
        """Seconds above which a candidate is neither the best of this packing nor as good as the best of all.

        With few chunks searches of homes begin at what is neither, too.
        """
        if self.few_chunks or self.best is None or self.found.best is None:
            return math.inf
        return max(self.best.seconds["total"], self.found.best.seconds["total"] * NEAR) * EXACTLY + ROUNDING_S

    def _take_any(self, candidate: Candidate | None) -> None:
        if candidate is not None and candidate is not self.found.best:
            self._take([candidate])

    def _take(self, candidates: Iterable[Candidate]) -> Candidate | None:
        taken = list(candidates)
        self.least_host_bytes = min([self.least_host_bytes, *(candidate.need.host_bytes for candidate in taken)])
        best = self.found.take(taken)
        if best is not None and (self.best is None or _less_ahead(best) < _less_ahead(self.best)):
            self.best = best
        return best


def _around(here: Choice, _most_s: float, *, step: int, most: int, depths: range) -> Iterator[Choice]:
    """Other depths, and so many blocks fewer and more."""
    blocks, depth = here
    yield from ((blocks, other) for other in depths)
    yield from ((count, depth) for count in (blocks - step, blocks + step) if 0 < count <= most)


def _less_ahead(candidate: Candidate) -> tuple[Key, int]:
    """Sorts like `sort_key`, and puts less prefetch first among equals."""
    return candidate.sort_key, candidate.schedule.prefetch_depth
