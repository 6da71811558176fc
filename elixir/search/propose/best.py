"""The search: sizes, blocks, prefetch and homes of the fastest step.

Three rounds, each with fewer packings and a closer look: fill the device by a few rules with fewest and most blocks;
vary blocks and depth; change homes of chunks one by one, or, with few chunks, try them all.

What the first Elixir would have chosen is a candidate, too: no plan that leaves the device is slower than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from elixir.search.problem import MemoryModel, Placement
from elixir.search.propose.candidate import NEAR, Candidate, early_instead, everything_resident
from elixir.search.propose.early_states import EarlyStates
from elixir.search.propose.fillings import Fillings
from elixir.search.propose.last_look import moved_while_better
from elixir.search.propose.local_search import EXACTLY, Polish
from elixir.search.propose.original_elixir import classic_candidates
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.units import LARGEST_BYTES

MOST_AHEAD = 4
"""Chunks fetched ahead at most: each takes a block, and what is fetched earlier than that waits there."""
SIZES_KEPT = 3
"""Packings that are looked at closer after a first look at all."""
SIZES_POLISHED = 2
EARLY_CHUNKS = 512
"""More packings get a closer look, with chunks that speculate, while all of them together have at most so many chunks.
"""
FEW_CHUNKS = 16
"""Up to so many, all homes are looked at unless they are too many in spite of what can be ruled out."""
ROUNDING_S = 1e-9
"""Seconds that put candidates in order are rounded to so much."""
MUCH_LESS = 0.97
"""Plans none of whose chunks speculate are not looked at more closely if they take over so much less than them."""
LITTLE_LESS = 1 - 2e-4
"""Plans that cannot be faster by so much are not looked at."""
PACKINGS_FOR_HOST = 6
"""Packings at which all homes are looked at for the least host memory: those that need least at a first look."""
STARTS = 8
"""Starting points of the search over homes of few chunks; one with more."""


@dataclass(frozen=True)
class Outcome:
    """The result of a search, and how near to feasible it came."""

    best: Candidate | None
    candidates: int
    """How many were looked at."""
    least_host: Candidate | None
    """The one that needs the least host memory of those that fit the device."""
    fastest_s: float | None = None
    """Seconds of the fastest step there is; None where nothing fits."""


def find_best(
    space: SearchSpace,
    budgets: Budgets,
    sizes: Iterable[int],
    prefetch_depth: int,
    *,
    classic: bool = False,
    briefly: bool = False,
) -> Outcome:
    """Search `sizes` with every placement.

    Args:
        space: what is searched.
        budgets: what a plan may use.
        sizes: chunk capacities in bytes.
        prefetch_depth: chunks fetched ahead, to begin with. Where it is not 0, all up to `MOST_AHEAD` are tried.
        classic: try what the first Elixir would have chosen as well, though its size be none of `sizes`.
        briefly: a first look at all sizes, and a closer one at the best: for questions that ask for many plans.
    """
    sizes = tuple(sizes)
    theirs = classic_candidates(space, budgets.device_bytes, prefetch_depth) if classic else []
    # Capacities that pack alike share a model, which the first of them names.
    models = {model.work.packing.capacity_bytes: model for model in (space.model(size) for size in sizes)}
    for candidate in theirs:
        capacity = candidate.work.packing.capacity_bytes
        models[capacity] = space.model(capacity)
    found = _Collection(budgets, theirs)
    depths = range(MOST_AHEAD + 1) if prefetch_depth else range(1)
    trials = [_Trials(space, model, budgets, found) for model in models.values()]
    for trial in trials:
        trial.look([prefetch_depth] if briefly else sorted({depths[0], min(prefetch_depth, depths[-1]), depths[-1]}))
    trials.sort(key=_Trials.order)  # stable: packings that are equally good stay in order of capacity
    plain_s, early = found.best_s, list[_Trials]()
    ahead = [prefetch_depth] if briefly else depths
    if space.setting.speculate is not False and found.best is not None:
        early = _speculating(space, budgets, trials[: SIZES_KEPT if briefly else None], found, ahead)
    if found.best is None or found.best_s > plain_s * MUCH_LESS:
        _closer(trials, found, depths, briefly=briefly)
    looked_at = 0
    for place, trial in enumerate(early):
        looked_at += len(trial.model.work.chunks)
        if place >= (1 if briefly else SIZES_KEPT) and (briefly or looked_at > EARLY_CHUNKS):
            break
        trial.early.vary(ahead, found.best_s)
        found.take(trial.early.found())
    quickest = min((trial.early for trial in early), key=lambda states: states.best_s, default=None)
    if quickest is not None and not briefly and quickest.best_s == found.best_s:
        quickest.fill_less()
        found.take([*quickest.found(), *quickest.fewest()])
    if found.best is None:
        return Outcome(None, found.count, found.least_host)
    if found.resident is not None and space.hardware.device_kind == "cpu":
        # The cores that would step a chunk meanwhile are those of compute, which no simulation knows.
        return Outcome(found.resident, found.count, found.least_host, found.resident.seconds["total"])
    if found.best.placement.early and _few_chunks(space, found.best):
        key = attrgetter("sort_key")
        found.take([moved_while_better(space, budgets, found.best, depth=prefetch_depth, key=key, cost=space.cost)])
    return Outcome(found.best, found.count, found.least_host, found.best_s)


def _few_chunks(space: SearchSpace, candidate: Candidate) -> bool:
    """Whether each chunk is a large part of the step."""
    return not space.setting.spill and len(candidate.work.chunks) <= FEW_CHUNKS


def _closer(trials: list[_Trials], found: _Collection, depths: range, *, briefly: bool) -> None:
    """A closer look at the best of packings at which there was a first look, in which no chunk speculates."""
    for trial in trials[: 1 if briefly else SIZES_KEPT]:
        trial.vary(depths)
    trials.sort(key=_Trials.order)
    if found.best is None and found.least_host is not None:
        # Some fit the device, but what they leave to the host does not fit there.
        for trial in sorted(trials, key=lambda trial: trial.least_host_bytes)[:PACKINGS_FOR_HOST]:
            trial.look_for_host(depths[0])
    for trial in trials if not briefly or len(trials[0].model.work.chunks) <= FEW_CHUNKS else ():
        trial.polish(depths, few=trial in trials[:SIZES_POLISHED])


def _speculating(
    space: SearchSpace, budgets: Budgets, trials: Sequence[_Trials], found: _Collection, depths: Sequence[int]
) -> list[_Trials]:
    """A first look at plans some of whose chunks speculate; packings worth a closer one, the best first."""
    best = [trial.best for trial in trials[:SIZES_POLISHED] if trial.best is not None]
    found.take(early for plain in best if (early := early_instead(plain, space.cost, budgets)) is not None)
    if space.setting.spill:
        return []  # what the host has more of would go to the disk
    floors_s = {trial: trial.early.look(trial.depth(depths[len(depths) > 1]), depths[0]) for trial in trials}
    for trial in sorted(trials, key=lambda trial: floors_s[trial]):
        if floors_s[trial] < found.best_s * LITTLE_LESS:
            trial.early.begin(depths, found.best_s * NEAR)
            found.take(trial.early.found())
    return sorted((trial for trial in trials if trial.early.best is not None), key=lambda trial: trial.early.best_s)


class _Trials:
    """All that is tried with one packing."""

    def __init__(self, space: SearchSpace, model: MemoryModel, budgets: Budgets, found: _Collection) -> None:
        self.space, self.model, self.budgets, self.found = space, model, budgets, found
        self.few_chunks = len(model.work.chunks) <= FEW_CHUNKS
        self.best: Candidate | None = None
        self.least_host_bytes = LARGEST_BYTES
        """Least host need of those that fit the device so far."""
        self._tried: dict[tuple[int, int], Candidate | None] = {}
        self._fillings = Fillings(model, budgets.device_bytes, space.cost)
        self.early = EarlyStates(space, model, self._fillings, budgets)

    def order(self) -> tuple[bool, tuple[float, ...]]:
        """Packings without anything that fits come last."""
        return (True, ()) if self.best is None else (False, self.best.sort_key)

    def depth(self, otherwise: int) -> int:
        """The depth of prefetch with which it is best so far."""
        streams = self.best is not None and not all(self.best.placement.resident)
        return self.best.schedule.prefetch_depth if self.best is not None and streams else otherwise

    def look(self, depths: Sequence[int]) -> None:
        """Fewest and most blocks."""
        resident = everything_resident(self.model, self.budgets.device_bytes, self.space.cost)
        if resident is not None:
            self._take([resident])
        # The least prefetch comes last, as what the others take often rules it out; of equals it is the first.
        for depth in (*depths[1:], depths[0]):
            counts = self._fillings.block_range(depth)
            for blocks in sorted({counts.start, counts.stop - 1}):
                self._try(blocks, depth)
        self._tried = dict(sorted(self._tried.items(), key=lambda tried: tried[0][::-1]))

    def vary(self, depths: range) -> None:
        """From the best so far, other depths and block counts in turn, in ever smaller steps."""
        here = min((key for key, tried in self._tried.items() if tried is not None), key=self._order, default=None)
        if here is None:
            return
        most = self._fillings.block_range(here[1]).stop - 1
        step = max(most // 4, 1)
        while step:
            blocks, depth = here
            around = [(blocks, other) for other in depths] if step > 1 or most < 4 else []
            around += [(count, depth) for count in (blocks - step, blocks + step) if 0 < count <= most]
            for key in around:
                self._try(*key)
            best = min((key for key in [here, *around] if self._tried[key] is not None), key=self._order)
            if best == here:
                step //= 2
            here = best

    def polish(self, depths: range, *, few: bool) -> None:
        """Search homes of chunks: all of them with few chunks; otherwise, for the few best packings, from the best so
        far."""
        if self.found.best is None:
            return
        if not self.few_chunks and not few:
            return
        for gathered in self._families():
            polish = Polish(self.model, self.budgets, self.space.cost, gathered=gathered)
            better = polish.better(self._starts(), depths, all_on_host=self.few_chunks) if few else None
            if better is not None:
                self._take([better])
            if self.few_chunks:
                better = polish.all(self.found.best, depths)
                if better is not None and better is not self.found.best:
                    self._take([better])
            self.found.count += polish.simulations

    def _families(self) -> tuple[bool, ...]:
        """Whether all chunks are resident, or none need be: with several ranks a plan is either."""
        if self.space.setting.world_size == 1:
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
                known = by_choice.get(choice)
                if known is None or tried.sort_key < known.sort_key:
                    by_choice[choice] = tried
        distinct: dict[Placement, Candidate] = {}
        for candidate in sorted(by_choice.values(), key=lambda candidate: candidate.sort_key):
            distinct.setdefault(candidate.placement, candidate)
        return list(distinct.values())[: STARTS if self.few_chunks else 1]

    def look_for_host(self, depth: int) -> None:
        """The homes that need least of the host, where all can be looked at."""
        if not self.few_chunks:
            return
        found = Polish(self.model, self.budgets, self.space.cost).least_host(depth, self.found.most_host_bytes)
        if found is not None:
            self._take([found])

    def _try(self, blocks: int, depth: int) -> None:
        key = (blocks, depth)
        if key not in self._tried:
            self._tried[key] = self._take(self._fillings.at(blocks, depth, self._most_s(), self.found.most_host_bytes))

    def _most_s(self) -> float:
        """Seconds above which a candidate is neither the best of this packing nor as good as the best of all.

        With few chunks searches of homes begin at what is neither, too.
        """
        if self.few_chunks or self.best is None or self.found.best is None:
            return math.inf
        return max(self.best.seconds["total"], self.found.best.seconds["total"] * NEAR) * EXACTLY + ROUNDING_S

    def _take(self, candidates: Iterable[Candidate]) -> Candidate | None:
        taken = list(candidates)
        self.least_host_bytes = min([self.least_host_bytes, *(candidate.need.host_bytes for candidate in taken)])
        best = self.found.take(taken)
        if best is not None and (self.best is None or _less_ahead(best) < _less_ahead(self.best)):
            self.best = best
        return best

    def _order(self, key: tuple[int, int]) -> tuple[float, ...]:
        tried = self._tried[key]
        return () if tried is None else tried.sort_key


class _Collection:
    """Keeps the best of what it is shown."""

    def __init__(self, budgets: Budgets, candidates: Iterable[Candidate]) -> None:
        self.count = 0
        self.best: Candidate | None = None
        self._host_bytes = budgets.host_bytes
        self.resident: Candidate | None = None
        """The best of those with everything on the device."""
        self.least_host: Candidate | None = None
        self.take(candidates)

    @property
    def best_s(self) -> float:
        """Seconds of the best."""
        return math.inf if self.best is None else self.best.seconds["total"]

    @property
    def most_host_bytes(self) -> int:
        """Bytes above which a candidate is neither within the budget nor the one with the least."""
        least = self.least_host
        return LARGEST_BYTES if least is None else max(self._host_bytes, least.need.host_bytes)

    def take(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """Look at candidates; the best of those that fit the host."""
        best: Candidate | None = None
        for candidate in candidates:
            self.count += 1
            if self.least_host is None or _by_host(candidate) < _by_host(self.least_host):
                self.least_host = candidate
            if candidate.need.host_bytes > self._host_bytes:
                continue
            whole = self.resident
            if candidate.placement.keeps_everything and (whole is None or candidate.sort_key < whole.sort_key):
                self.resident = candidate
            if best is None or candidate.sort_key < best.sort_key:
                best = candidate
        if best is not None and (self.best is None or best.sort_key < self.best.sort_key):
            self.best = best
        return best


def _less_ahead(candidate: Candidate) -> tuple[tuple[float, ...], int]:
    """Sorts like `sort_key`, and puts less prefetch first among equals."""
    return candidate.sort_key, candidate.schedule.prefetch_depth


def _by_host(candidate: Candidate) -> tuple[int, tuple[float, ...]]:
    return candidate.need.host_bytes, candidate.sort_key
