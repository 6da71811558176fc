"""The best homes for the chunks of one packing: all of them if there are few, otherwise from good ones to better ones.

The number of blocks is not searched: it is as many as fit next to the homes, as more of them only keep more chunks.
Which chunks are updated early follows from a rule, wherever they live. With few chunks each is a large part of the
step, so that one for which the rule chooses badly is worth percents: these are tried one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, islice, pairwise, takewhile
from math import comb
from operator import attrgetter

import numpy as np

from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packing import Ints
from elixir.search.problem.placement import Bools, Codes, Placement
from elixir.search.propose.candidate import Candidate, early_host_bytes, updated_early, weigh
from elixir.search.propose.climb import DECIMALS, EXACTLY, LITTLE_LESS, climb
from elixir.search.propose.placement_batch import Look, Variants
from elixir.search.propose.sizes import Budgets
from elixir.search.simulator.early_updates import can_step
from elixir.search.simulator.simulated_cost import SimulatedCost

_by_seconds = attrgetter("sort_key")
Change = tuple[int, int]
"""A chunk, and the number of its new home."""
LOOKS = 300_000
"""Variants times chunks that are looked at per packing; about a tenth of a second."""
SIMULATED_CHUNKS = 5_000
"""Simulations times chunks per packing; a tenth of a second, more where chunks are used often."""
MOST_SIMULATIONS = 1000
FEW_SIMULATIONS = 100
"""Simulations at most of a brief search, and where chunks are updated early: there each placement has several choices
of these chunks."""
MOST_AT_ONCE = 3
"""Chunks that change their homes in one step."""


class LocalSearch:
    """Homes of one packing.

    Args:
        model: memory of the packing.
        budgets: what a plan may use.
        cost: the time model.
        gathered: with several ranks, all chunks are resident, else none.
        early: some chunks are updated early; otherwise none is.
        briefly: change fewer chunks at once, ignore gains that no run could measure, and simulate less.
    """

    def __init__(
        self,
        model: MemoryModel,
        budgets: Budgets,
        cost: SimulatedCost,
        *,
        gathered: bool = False,
        early: bool = False,
        briefly: bool = False,
    ) -> None:
        self.model, self.budgets, self.cost, self._early = model, budgets, cost, early
        self._at_once = MOST_AT_ONCE - early - briefly
        self._bound = LITTLE_LESS if early or briefly else EXACTLY
        self.variants = Variants(model, cost, gathered=gathered)
        self._simulations = 0
        count = len(model.work.chunks)
        most = FEW_SIMULATIONS if early or briefly else MOST_SIMULATIONS
        self._most_simulations = most if early else min(SIMULATED_CHUNKS // count, most)
        self._most_looks = LOOKS // count
        self._known: dict[tuple[Placement, int], Candidate | None] = {}

    def all(self, best: Candidate, depths: Sequence[int]) -> Candidate:
        """The best of all homes and depths; if there are too many, less than that, and maybe only `best`."""
        codes = self._branches(best.seconds["total"], self.budgets.host_bytes)
        if codes is None:
            return best
        look = self._look(codes)
        # The closure sees the best so far.
        rows = takewhile(lambda row: look.lower_bound_s[row] <= best.seconds["total"] * EXACTLY, self._promising(look))
        for found in self._simulated(codes, look, rows, depths):
            best = min(best, found, key=_by_seconds)
        return best

    def least_host(self, depth: int, most_host_bytes: int) -> Candidate | None:
        """The homes that need least of the host, and no more than so much; None where none do and fit the device, or
        too much is to be tried."""
        codes = self._branches(math.inf, most_host_bytes)
        if codes is None:
            return None
        look = self._look(codes)
        rows = np.argsort(look.host_bytes, kind="stable").tolist()
        return next(self._simulated(codes, look, rows, (depth,)), None)

    def _branches(self, most_s: float, most_host_bytes: int) -> Codes | None:
        """All variants that may be allowed and take no longer; None where that takes more than `LOOKS`.

        Chunk after chunk, the largest first, gets all its homes; what the chunks so far rule out is left out at once.
        """
        facts = self.model.work.chunks
        order = sorted(range(len(facts)), key=lambda chunk: (-facts[chunk].bytes, chunk))
        codes: Codes = np.zeros((1, 0), dtype=np.int8)
        looks = 0
        for count, chunk in enumerate(order, start=1):
            homes = np.array(self.variants.homes[chunk], dtype=np.int8)
            codes = np.column_stack((np.repeat(codes, len(homes), axis=0), np.tile(homes, len(codes))))
            looks += codes.size
            if looks > LOOKS:
                return None
            look = self._look(codes, np.array(order[:count]))
            codes = codes[_may_be(look, most_s * EXACTLY, most_host_bytes)]
        back = np.argsort(order)
        return np.ascontiguousarray(codes[:, back])

    def better(
        self, starts: Iterable[Candidate], depths: Sequence[int], *, all_on_host: bool = False
    ) -> Candidate | None:
        """Changes homes of chunks from each start, a few at a time for as long as that helps and there is work left.

        Args:
            starts: the most promising first.
            depths: of prefetch, to choose from.
            all_on_host: start from there too, unlike what keeps as much on the device as it holds.
        """
        on_host = np.array([[homes[0] for homes in self.variants.homes]], dtype=np.int8)
        some = [*starts, *(self._allowed(on_host, math.inf, depths) if all_on_host else ())]
        found = [climb(start, partial(self.neighbours, depths=depths), _by_seconds, self._bound) for start in some]
        return min(found, key=_by_seconds, default=None)

    def neighbours(self, here: Candidate, most_s: float, *, depths: Sequence[int]) -> Iterator[Candidate]:
        """Candidates near `here` that may take no more than `most_s`: with other early updates, then with another home
        for one chunk, then for more at once."""
        depth = depths[0] if self._early and not here.schedule.blocks else here.schedule.prefetch_depth
        if self._early:
            yield from self._updated_otherwise(here, most_s)
        codes = self.variants.codes(here.placement.updated_early(()))
        if codes is None:
            return
        for at_once in range(1, self._at_once + 1):
            yield from self._allowed(self._moved(codes, at_once), most_s, (depth,))
            if at_once == 1 and not self._early:
                yield from self._allowed(codes[None], most_s, [other for other in depths if other != depth])

    def _updated_otherwise(self, here: Candidate, most_s: float) -> Iterator[Candidate]:
        """One chunk more that is updated early, one fewer, or one or two neighbours instead."""
        placement, now, blocks = here.placement, here.placement.early, here.schedule.blocks
        if self.cost.lower_bound_of(here.work, placement, blocks, early=True) > most_s:
            return
        able = sorted(can_step(here.work, placement) - placement.state_on_disk)
        for change in [*((chunk,) for chunk in able), *pairwise(able), *zip(able, able[1:], able[2:], strict=False)]:
            early = now.symmetric_difference(change)
            changed = placement.updated_early(early)
            fits = sum(self.model.host_parts(changed).values()) <= early_host_bytes(self.model, self.budgets)
            if early and fits and len(early) - len(now) in (-1, 0, 1) and self._simulations < self._most_simulations:
                found = self._weigh(changed, blocks, here.schedule.prefetch_depth)
                if found is not None:
                    yield found

    def _allowed(self, codes: Codes, most_s: float, depths: Sequence[int]) -> Iterator[Candidate]:
        """Variants that may be allowed and take no more than `most_s`, the most promising first."""
        self._most_looks -= len(codes)
        look = self._look(codes)
        yield from self._simulated(codes, look, self._promising(look, most_s), depths)

    def _simulated(self, codes: Codes, look: Look, rows: Iterable[int], depths: Sequence[int]) -> Iterator[Candidate]:
        """The variants of some rows, until enough were simulated."""
        for row in rows:
            for depth in depths:
                if self._simulations >= self._most_simulations:
                    return
                found = self._weigh(Placement.numbered(codes[row].tolist()), int(look.blocks[row]), depth)
                if found is not None:
                    yield found

    def _look(self, codes: Codes, chunks: Ints | None = None) -> Look:
        return self.variants.look(codes, self.budgets.device_bytes, chunks, early=self._early)

    def _moved(self, codes: Codes, at_once: int) -> Codes:
        """Variants with other homes for so many chunks, of those near each other in order of use if there are many."""
        here = codes.tolist()
        ones = [
            (chunk, code) for chunk, homes in enumerate(self.variants.homes) for code in homes if code != here[chunk]
        ]
        # A look may take a quarter of what is left, so that there are several.
        most = max(self._most_looks // 4, 0)
        changes = [change for change in islice(_near(ones, at_once, most), most) if _apart(change)]
        found = np.tile(codes, (len(changes), 1))
        for place in range(at_once if changes else 0):
            chunks, others = zip(*(change[place] for change in changes), strict=True)
            found[np.arange(len(changes)), list(chunks)] = others
        return found

    def _promising(self, look: Look, most_s: float = math.inf) -> list[int]:
        """Rows that may be allowed and take no more than `most_s`, the most promising first."""
        rows = np.flatnonzero(_may_be(look, most_s, self.budgets.host_bytes))
        # Rounded, so that the last bits of a sum, which machines may give differently, do not put equal ones in order.
        order: list[int] = rows[np.argsort(np.round(look.lower_bound_s[rows], DECIMALS), kind="stable")].tolist()
        return order

    def _weigh(self, placement: Placement, blocks: int, depth: int) -> Candidate | None:
        """The candidate with as many blocks as fit; None where fewer fit than are needed.

        If chunks are to be updated early and none is yet, those are with which it is best.
        """
        key = (placement, depth)
        if key not in self._known:
            found: Candidate | None = None
            work = self.model.work
            streamed = sum(used and not gone for used, gone in zip(work.used, placement.resident, strict=True))
            # Where anything is streamed, the first window has as many chunks as there are, and as depth allows.
            if min(streamed, 1 + depth) <= blocks:
                self._simulations += 1
                fewest = work.schedule(placement.residents, depth).min_blocks
                if fewest <= blocks:
                    found = weigh(self.model, placement, blocks if fewest else 0, depth, self.cost)
                    if self._early and not placement.early:
                        found = updated_early(found, self.budgets)
                    if found and self.model.setting.spill and found.need.host_bytes > self.budgets.host_bytes:
                        found = None  # a look does not know what the disk can take
            self._known[key] = found
        return self._known[key]


def _may_be(look: Look, most_s: float, most_host_bytes: int) -> Bools:
    """The candidates that may be allowed, and take no longer."""
    good: Bools = (look.blocks >= 0) & (look.host_bytes <= most_host_bytes) & (look.lower_bound_s <= most_s)
    return good


def _near(ones: list[Change], at_once: int, most: int) -> Iterator[tuple[Change, ...]]:
    """Combinations within a window that slides over `ones`, as wide as makes about `most` of them."""
    width = at_once
    while width < len(ones) and len(ones) * comb(width, at_once - 1) <= most:
        width += 1
    for at, first in enumerate(ones):
        for others in combinations(ones[at + 1 : at + width], at_once - 1):
            yield (first, *others)


def _apart(changes: tuple[Change, ...]) -> bool:
    """Whether no chunk is in there twice."""
    return len({chunk for chunk, _ in changes}) == len(changes)
