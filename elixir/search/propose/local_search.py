"""The best homes for the chunks of one packing: all of them if there are few, otherwise from good ones to better ones.

The number of blocks is not searched: it is as many as fit next to the homes, as more of them only keep more chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from math import comb

import numpy as np
import numpy.typing as npt

from elixir.search.problem import Codes, Ints, MemoryModel, Placement
from elixir.search.propose.candidate import Candidate, weigh
from elixir.search.propose.placement_batch import Look, Variants
from elixir.search.propose.sizes import Budgets
from elixir.search.simulator import SimulatedCost

Change = tuple[int, int]
"""A chunk, and the number of its new home."""
EXACTLY = 1 + 1e-9
"""Floors are above what they bound by no more than the rounding of their sums."""

DECIMALS = 9
"""Digits of seconds by which candidates are put in order, as in `Candidate.sort_key`."""
LOOKS = 300_000
"""Variants times chunks that are looked at per packing; about a tenth of a second."""
SIMULATED_CHUNKS = 5_000
"""Simulations times chunks per packing; a tenth of a second, more where chunks are used often."""
MOST_SIMULATIONS = 1000
MOST_AT_ONCE = 3
"""Chunks that change their homes in one step."""


class Polish:
    """Homes of one packing.

    Args:
        model: memory of the packing.
        budgets: what a plan may use.
        cost: the time model.
        gathered: with several ranks, all chunks are resident, else none.
    """

    def __init__(self, model: MemoryModel, budgets: Budgets, cost: SimulatedCost, *, gathered: bool = False) -> None:
        self.model, self.budgets, self.cost = model, budgets, cost
        self.variants = Variants(model, cost, gathered=gathered)
        self.simulations = 0
        count = len(model.work.chunks)
        self._most_simulations = min(SIMULATED_CHUNKS // count, MOST_SIMULATIONS)
        self._most_looks = LOOKS // count
        self._known: dict[tuple[bytes, int], Candidate | None] = {}

    def all(self, best: Candidate | None, depths: Sequence[int]) -> Candidate | None:
        """The best of all homes and depths; if there are too many, less than that, and maybe only `best`."""
        codes = self._branches(best, self.budgets.host_bytes)
        if codes is None:
            return best
        look = self.variants.look(codes, self.budgets.device_bytes)
        for row in self._promising(look, best):
            if best is not None and look.floor_s[row] > best.seconds["total"] * EXACTLY:
                break
            for depth in depths:
                if self.simulations >= self._most_simulations:
                    return best
                found = self._weigh(codes[row], int(look.blocks[row]), depth)
                if found is not None and (best is None or found.sort_key < best.sort_key):
                    best = found
        return best

    def least_host(self, depth: int, most_host_bytes: int) -> Candidate | None:
        """The homes that need least of the host, and no more than so much; None where none do and fit the device, or
        too much is to be tried."""
        codes = self._branches(None, most_host_bytes)
        if codes is None:
            return None
        look = self.variants.look(codes, self.budgets.device_bytes)
        for row in np.argsort(look.host_bytes, kind="stable").tolist():
            if self.simulations >= self._most_simulations:
                break
            found = self._weigh(codes[row], int(look.blocks[row]), depth)
            if found is not None:
                return found
        return None

    def _branches(self, best: Candidate | None, most_host_bytes: int) -> Codes | None:
        """All variants that may be allowed and better than `best`; None where that takes more than `LOOKS`.

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
            look = self.variants.look(codes, self.budgets.device_bytes, np.array(order[:count]))
            codes = codes[self._may_be(look, best, most_host_bytes)]
        back = np.argsort(order)
        return np.ascontiguousarray(codes[:, back])

    def better(
        self, starts: Sequence[Candidate], depths: Sequence[int], *, all_on_host: bool = False
    ) -> Candidate | None:
        """From each start, chunks change homes a few at a time for as long as that helps and there is work left.

        Args:
            starts: the most promising first.
            depths: of prefetch, to choose from.
            all_on_host: start from there too, unlike what keeps as much on the device as it holds.
        """
        best: Candidate | None = None
        for start in [*starts, *(self._all_on_host(depths) if all_on_host else ())]:
            better = self._step(start, depths)
            while better is not start:
                start, better = better, self._step(better, depths)
            if best is None or start.sort_key < best.sort_key:
                best = start
        return best

    def _all_on_host(self, depths: Sequence[int]) -> Iterator[Candidate]:
        codes = np.array([[homes[0] for homes in self.variants.homes]], dtype=np.int8)
        look = self.variants.look(codes, self.budgets.device_bytes)
        if look.blocks[0] >= 0 and look.host_bytes[0] <= self.budgets.host_bytes:
            for depth in depths:
                found = self._weigh(codes[0], int(look.blocks[0]), depth)
                if found is not None:
                    yield found

    def _step(self, best: Candidate, depths: Sequence[int]) -> Candidate:
        """A better neighbour, the most promising being looked at first; `best` where none is."""
        codes = self.variants.codes(best.placement)
        if codes is None:
            return best
        here = best.schedule.prefetch_depth
        for at_once in range(1, MOST_AT_ONCE + 1):
            found = self._first_better(self._neighbours(codes, at_once), best, (here,))
            if found is None and at_once == 1:
                found = self._first_better(codes[None], best, [depth for depth in depths if depth != here])
            if found is not None:
                return found
        return best

    def _first_better(self, codes: Codes, best: Candidate, depths: Sequence[int]) -> Candidate | None:
        self._most_looks -= len(codes)
        look = self.variants.look(codes, self.budgets.device_bytes)
        for row in self._promising(look, best):
            for depth in depths:
                if self.simulations >= self._most_simulations:
                    return None
                found = self._weigh(codes[row], int(look.blocks[row]), depth)
                if found is not None and found.sort_key < best.sort_key:
                    return found
        return None

    def _neighbours(self, codes: Codes, at_once: int) -> Codes:
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

    def _may_be(self, look: Look, best: Candidate | None, most_host_bytes: int) -> npt.NDArray[np.bool_]:
        """Which may be allowed, and better than the best."""
        good = (look.blocks >= 0) & (look.host_bytes <= most_host_bytes)
        if best is not None:
            good &= look.floor_s <= best.seconds["total"] * EXACTLY
        return np.asarray(good, dtype=bool)

    def _promising(self, look: Look, best: Candidate | None) -> list[int]:
        """Rows that may be allowed and better than the best, the most promising first."""
        rows: Ints = np.flatnonzero(self._may_be(look, best, self.budgets.host_bytes))
        # Rounded, so that the last bits of a sum, which machines may give differently, do not put equal ones in order.
        floors_s = np.round(look.floor_s[rows], DECIMALS)
        order: list[int] = rows[np.argsort(floors_s, kind="stable")].tolist()
        return order

    def _weigh(self, codes: Codes, blocks: int, depth: int) -> Candidate | None:
        """The candidate with as many blocks as fit; None where fewer fit than are needed."""
        key = (codes.tobytes(), depth)
        if key not in self._known:
            placement = Placement.numbered(codes.tolist())
            found, work = None, self.model.work
            streamed = sum(used and not gone for used, gone in zip(work.used, placement.resident, strict=True))
            # Where anything is streamed, the first window has as many chunks as there are, and as depth allows.
            if min(streamed, 1 + depth) <= blocks:
                self.simulations += 1
                fewest = work.schedule(placement.residents, depth).min_blocks
                if fewest <= blocks:
                    found = weigh(self.model, placement, blocks if fewest else 0, depth, self.cost)
                    if self.model.setting.spill and found.need.host_bytes > self.budgets.host_bytes:
                        found = None  # a look does not know what the disk can take
            self._known[key] = found
        return self._known[key]


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
