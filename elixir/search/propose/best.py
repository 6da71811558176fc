"""The search: sizes, blocks, prefetch and homes of the fastest step, and of those near it the one that risks least.

Three rounds, each with fewer packings and a closer look: fill the device by a few rules with fewest and most blocks;
vary blocks and depth; change homes of chunks one by one, or, with few chunks, try them all.

What the first Elixir would have chosen is a candidate, too: no plan that leaves the device is slower than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from elixir.search.problem import MemoryModel, Placement
from elixir.search.propose.candidate import NEAR, Candidate, everything_resident, speculating, weigh
from elixir.search.propose.early_states import EarlyStates
from elixir.search.propose.fillings import Fillings
from elixir.search.propose.last_look import moved_while_better
from elixir.search.propose.local_search import DECIMALS, EXACTLY, Polish
from elixir.search.propose.original_elixir import classic_candidates
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.simulator import worst_case
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
MOST_WEIGHED = 24
"""Plans whose worst case is simulated, at most."""
ROUNDING_S = 1e-9
"""Seconds that put candidates in order are rounded to so much."""
MUCH_LESS = 0.97
"""Plans none of whose chunks speculate are not looked at more closely if they take over so much less than them."""
LITTLE_LESS = 1 - 2e-4
"""Plans that cannot be faster by so much are not looked at."""
SLOWER_HOSTS = (1.0, 0.5, 0.25)
"""Hosts for which a hedged search plans, as powers of the slowest: Adam x 0.3, 0.55 and 0.74."""
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
    hedge: float = NEAR - 1,
) -> Outcome:
    """Search `sizes` with every placement.

    Args:
        space: what is searched.
        budgets: what a plan may use.
        sizes: chunk capacities in bytes.
        prefetch_depth: chunks fetched ahead, to begin with. Where it is not 0, all up to `MOST_AHEAD` are tried.
        classic: try what the first Elixir would have chosen as well, though its size be none of `sizes`.
        briefly: a first look at all sizes, and a closer one at the best: for questions that ask for many plans.
        hedge: `SearchRequest.hedge`.
    """
    sizes = tuple(sizes)
    theirs = classic_candidates(space, budgets.device_bytes, prefetch_depth) if classic else []
    # Capacities that pack alike share a model, which the first of them names.
    models = {model.work.packing.capacity_bytes: model for model in (space.model(size) for size in sizes)}
    for candidate in theirs:
        capacity = candidate.work.packing.capacity_bytes
        models[capacity] = space.model(capacity)
    found = _Collection(budgets, theirs, max(NEAR, 1 + hedge))
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
        found.take(quickest.found())
    if found.best is None:
        return Outcome(None, found.count, found.least_host)
    if found.resident is not None and space.hardware.device_kind == "cpu":
        # The cores that would step a chunk meanwhile are those of compute, which no simulation knows.
        return Outcome(found.resident, found.count, found.least_host, found.resident.seconds["total"])
    others = _for_slower_hosts(space, budgets, sizes, prefetch_depth, briefly) if 1 + hedge > NEAR else iter(())
    last_look = partial(moved_while_better, space, budgets, depth=prefetch_depth)
    if found.best.speculating and _few_chunks(space, found.best):
        found.take([last_look(found.best, key=lambda candidate: candidate.sort_key, cost=space.cost)])
    best = _surest(space, budgets, trials, found, hedge, others)
    if hedge and _few_chunks(space, best):
        best = _surer(space, best, last_look, found, hedge)
        found.take([best])
    return Outcome(best, found.count, found.least_host, found.best_s)


def _few_chunks(space: SearchSpace, candidate: Candidate) -> bool:
    """Whether each chunk is a large part of the step."""
    return not space.setting.spill and len(candidate.work.chunks) <= FEW_CHUNKS


def _surer(
    space: SearchSpace, best: Candidate, last_look: Callable[..., Candidate], found: _Collection, hedge: float
) -> Candidate:
    """A neighbour of `best` with a better worst case that takes at most `hedge` more than the fastest, the fastest such
    one; `best` if that is the fastest and its worst case nearly as short.

    If that is not certain to be short, its worst case may also be nearly as good.
    """
    if best is found.best and _worst_s(space, best) <= found.best_s * NEAR:
        return best
    most_s, certain = found.best_s * (1 + hedge), 1 + hedge <= NEAR

    def risk(candidate: Candidate) -> tuple[float, ...]:
        worst_s = _worst_s(space, candidate) if candidate.seconds["total"] <= most_s else math.inf
        return round(worst_s, DECIMALS), *candidate.sort_key

    surer = last_look(best, key=risk, cost=space.worst_cost)
    enough_s = risk(surer)[0] * (1.0 if certain else NEAR)

    def seconds(candidate: Candidate) -> tuple[float, ...]:
        return candidate.sort_key if risk(candidate)[0] <= enough_s else (math.inf,)

    return last_look(min(best, surer, key=seconds), key=seconds, cost=space.cost)


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
    found.take(early for plain in best if (early := speculating(space, plain, budgets)) is not None)
    if space.setting.spill:
        return []  # what the host has more of would go to the disk
    floors_s = {trial: trial.early.look(trial.depth(depths[len(depths) > 1]), depths[0]) for trial in trials}
    for trial in sorted(trials, key=lambda trial: floors_s[trial]):
        if floors_s[trial] < found.best_s * LITTLE_LESS:
            trial.early.begin(depths, found.best_s * NEAR)
            found.take(trial.early.found())
    return sorted((trial for trial in trials if trial.early.best is not None), key=lambda trial: trial.early.best_s)


def _surest(
    space: SearchSpace,
    budgets: Budgets,
    trials: Sequence[_Trials],
    found: _Collection,
    hedge: float,
    others: Iterator[Candidate],
) -> Candidate:
    """The plan with the best worst case, of those that take at most `hedge` more than the fastest; `others` are looked
    at, too, if that one is not safe.

    Bytes that spare a link some of its work, but no time, can be bought with states on the host. If CPU Adam is then
    slower than the profile says, as it often is, only such a plan waits for it.
    """
    if found.best is None:
        raise ValueError("there is no plan to choose from")
    near_s, most_s = found.best.seconds["total"] * NEAR, found.best.seconds["total"] * (1 + hedge)
    fastest = _quick_enough(space, found.best, near_s)
    if not hedge:
        return fastest
    worst_s = {id(fastest): _worst_s(space, fastest)}
    if worst_s[id(fastest)] <= near_s:
        return fastest
    made = list(others)
    found.take(made)
    near_s, most_s = found.best_s * NEAR, found.best_s * (1 + hedge)
    made = [candidate for candidate in made if candidate.seconds["total"] <= most_s]
    if found.best.speculating:
        found.take(min(trials, key=lambda trial: trial.early.best_s).early.fewest(most_s))
    near = {(c.placement, c.schedule.blocks, c.work.packing.capacity_bytes): c for c in found.near(most_s)}
    sparing = sorted(near.values(), key=lambda candidate: (_hosted_numel(candidate), candidate.sort_key))
    weighed = [fastest]
    # The work of a host that is slow is what makes the worst case, so the plans with least of it come first.
    for near_one in [*made, *sparing[:MOST_WEIGHED]]:
        candidate = _quick_enough(space, near_one, min(near_s, most_s))
        most_worst_s = min(worst_s.values()) * EXACTLY + ROUNDING_S
        floor_s = space.worst_cost.floor_of(
            candidate.work, candidate.placement, candidate.schedule.blocks, speculating=bool(candidate.speculating)
        )
        if id(candidate) not in worst_s and floor_s <= most_worst_s:
            worst_s[id(candidate)] = _worst_s(space, candidate)
            weighed.append(candidate)

    def risk(candidate: Candidate) -> tuple[float, tuple[float, ...]]:
        return round(worst_s[id(candidate)], 9), candidate.sort_key

    best = min(weighed, key=risk)
    for candidate in () if best.speculating else _with_fewer_blocks(space, budgets, best, most_s * EXACTLY):
        if id(candidate) not in worst_s and candidate.seconds["total"] <= most_s:
            worst_s[id(candidate)] = _worst_s(space, candidate)
            weighed.append(candidate)
    if 1 + hedge > NEAR:  # seconds of the worst case are not known well enough to give certain ones for less
        enough_s = min(worst_s.values()) * NEAR
        return min((c for c in weighed if worst_s[id(c)] <= enough_s), key=lambda candidate: candidate.sort_key)
    return min(weighed, key=risk)


def _for_slower_hosts(
    space: SearchSpace, budgets: Budgets, sizes: tuple[int, ...], prefetch_depth: int, briefly: bool
) -> Iterator[Candidate]:
    """The fastest plans for hosts from the slowest to nearly that of the profile, with the seconds that they take with
    this one."""
    for power in SLOWER_HOSTS:
        slower = space.on(worst_case(space.hardware, power))
        best = find_best(slower, budgets, sizes, prefetch_depth, briefly=briefly, hedge=0.0).best
        if best is not None:
            yield replace(best, seconds=best.seconds_by(space.cost))


def _quick_enough(space: SearchSpace, early: Candidate, most_s: float) -> Candidate:
    """The same with no chunk speculating if that takes no more than `most_s`: rates are not known well enough to give
    memory for less. Not if the user asked for it."""
    if not early.speculating or space.setting.speculate:
        return early
    if space.cost.floor_of(early.work, early.placement, early.schedule.blocks) > most_s:
        return early
    model, schedule = space.model(early.work.packing.capacity_bytes), early.schedule
    plain = weigh(model, early.placement, schedule.blocks, schedule.prefetch_depth, space.cost)
    return plain if plain.seconds["total"] <= most_s else early


def _worst_s(space: SearchSpace, candidate: Candidate) -> float:
    return candidate.seconds_by(space.worst_cost)["total"]


def _with_fewer_blocks(space: SearchSpace, budgets: Budgets, best: Candidate, most_s: float) -> list[Candidate]:
    """The same packing with a half, a quarter, ... of the blocks, and what then fits instead of them.

    Maybe without what takes longer than `most_s`.
    """
    model, depth = space.model(best.work.packing.capacity_bytes), best.schedule.prefetch_depth
    fillings = Fillings(model, budgets.device_bytes, space.cost)
    fewest = fillings.block_range(depth).start
    counts, blocks = [], best.schedule.blocks // 2
    while blocks > fewest:
        counts.append(blocks)
        blocks //= 2
    if not best.placement.keeps_everything:
        counts.append(fewest)
    found = (candidate for blocks in counts for candidate in fillings.at(blocks, depth, most_s))
    return [candidate for candidate in found if candidate.need.host_bytes <= budgets.host_bytes]


def _hosted_numel(candidate: Candidate) -> int:
    """Elements that the host steps."""
    chunks = zip(candidate.work.chunks, candidate.placement.state_on_device, strict=True)
    return sum(chunk.numel for chunk, on_device in chunks if chunk.grad_bytes and not on_device)


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

    def __init__(self, budgets: Budgets, candidates: Iterable[Candidate], near: float) -> None:
        self.count = 0
        self._near_share = near
        self.best: Candidate | None = None
        self._host_bytes = budgets.host_bytes
        self._near: list[Candidate] = []
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
            if self.best is None or candidate.seconds["total"] <= self.best.seconds["total"] * self._near_share:
                self._near.append(candidate)
            whole = self.resident
            if candidate.placement.keeps_everything and (whole is None or candidate.sort_key < whole.sort_key):
                self.resident = candidate
            if best is None or candidate.sort_key < best.sort_key:
                best = candidate
        if best is not None and (self.best is None or best.sort_key < self.best.sort_key):
            self.best = best
        return best

    def near(self, most_s: float) -> list[Candidate]:
        """Those that fit and take no longer."""
        return [candidate for candidate in self._near if candidate.seconds["total"] <= most_s]


def _less_ahead(candidate: Candidate) -> tuple[tuple[float, ...], int]:
    """Sorts like `sort_key`, and puts less prefetch first among equals."""
    return candidate.sort_key, candidate.schedule.prefetch_depth


def _by_host(candidate: Candidate) -> tuple[int, tuple[float, ...]]:
    return candidate.need.host_bytes, candidate.sort_key
