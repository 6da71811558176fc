"""The search: sizes, blocks, prefetch and homes of the fastest step, found in the rounds of `ROUNDS`.

What the first Elixir would have chosen is a candidate, too: no plan that leaves the device is slower than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from elixir.plan.prediction import Judgement
from elixir.search.propose.candidate import Candidate, Found, updated_early
from elixir.search.propose.climb import LITTLE_LESS, MUCH_LESS
from elixir.search.propose.local_search import LocalSearch
from elixir.search.propose.original_elixir import classic_candidates
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.propose.trials import FEW_CHUNKS, Trials

MOST_AHEAD = 4
"""Chunks fetched ahead at most: each takes a block, and what is fetched earlier than that waits there."""
SIZES_KEPT = 3
"""Packings that are looked at closer after a first look at all."""
SIZES_PLACED = 2
"""Packings whose chunks are placed one by one."""
EARLY_CHUNKS = 512
"""More packings get a closer look, with chunks updated early, while all of them together have at most so many chunks.
"""
PACKINGS_FOR_HOST = 6
"""Packings at which all homes are looked at for the least host memory: those that need least at a first look."""


@dataclass(frozen=True)
class Outcome:
    """The result of a search, and how near to feasible it came."""

    best: Candidate | None
    least_host: Candidate | None
    """The one that needs the least host memory of those that fit the device."""
    fastest_s: float | None = None
    """Seconds of the fastest step there is; None where nothing fits."""
    resident: Candidate | None = None
    """The best with everything on the device."""
    packings: tuple[int, ...] = ()
    """Capacities by which the step was packed, the best first."""
    judgements: tuple[Judgement, ...] = ()
    """The best in each scenario; empty if it was chosen for one."""
    regret_if_known: dict[str, float] = field(default_factory=dict)
    """`Prediction.regret_if_known`."""


def find_best(
    space: SearchSpace,
    budgets: Budgets,
    sizes: Iterable[int],
    prefetch_depth: int,
    *,
    classic: bool = False,
    briefly: bool = False,
    known: Iterable[Candidate] = (),
    rounds: Iterable[Round] | None = None,
) -> Outcome:
    """Searches `sizes` with every placement.

    Args:
        space: what is searched.
        budgets: what a plan may use.
        sizes: chunk capacities in bytes.
        prefetch_depth: chunks fetched ahead, to begin with. Where it is not 0, all up to `MOST_AHEAD` are tried.
        classic: try what the first Elixir would have chosen as well, though its size be none of `sizes`.
        briefly: a first look at all sizes, and a closer one at the best: for questions that ask for many plans.
        known: candidates of the same sizes that are good in other scenarios. With some, homes are changed from the best
            of all alone.
        rounds: `FIRST_LOOK`, or all by default.
    """
    search = _Search(space, budgets, tuple(sizes), prefetch_depth, classic=classic, briefly=briefly, known=known)
    for look in ROUNDS if rounds is None else rounds:
        look(search)
        if search.settled:
            break
    found = search.found
    best = found.resident if search.settled else found.best
    packings = [trials.model.work.packing.capacity_bytes for trials in sorted(search.trials, key=Trials.least_s)]
    fastest_s = None if best is None else best.seconds["total"]
    return Outcome(best, found.least_host, fastest_s, found.resident, tuple(packings))


class _Search:
    """State that the rounds share: the packings, what was found, and how far to look."""

    def __init__(
        self,
        space: SearchSpace,
        budgets: Budgets,
        sizes: tuple[int, ...],
        prefetch_depth: int,
        *,
        classic: bool,
        briefly: bool,
        known: Iterable[Candidate] = (),
    ) -> None:
        self.space, self.budgets, self.depth, self.briefly = space, budgets, prefetch_depth, briefly
        theirs = classic_candidates(space, budgets.device_bytes, prefetch_depth) if classic else []
        models = [*(space.model(size) for size in sizes), *(candidate.model for candidate in theirs)]
        self.known = [replace(candidate, cost=space.cost) for candidate in known]
        self.found = Found(budgets, [*theirs, *self.known])
        # Capacities that pack alike share a model, which the first of them names.
        self.trials = [Trials(model, budgets, space.cost, self.found) for model in dict.fromkeys(models)]
        self.early: list[Trials] = []
        """Packings worth a closer look at early updates, the best first."""
        self.depths = range(MOST_AHEAD + 1) if prefetch_depth else range(1)
        self.ahead = range(prefetch_depth, prefetch_depth + 1) if briefly else self.depths
        """Depths of prefetch to try with early updates."""
        self.early_suffices = False
        """Whether early updates make the step so much shorter that others need no closer look."""

    @property
    def settled(self) -> bool:
        """Whether no other plan is wanted: on a CPU, if everything fits the device.

        The cores that would step a chunk meanwhile are those of compute, which no simulation knows.
        """
        return self.found.resident is not None and self.space.hardware.device_kind == "cpu"


def keep_everything(search: _Search) -> None:
    """On a CPU: everything on the device, if it fits."""
    if search.space.hardware.device_kind == "cpu":
        for trials in search.trials:
            trials.keep_everything()


def fill(search: _Search) -> None:
    """Every packing: fill the device by a few rules, with fewest and most blocks."""
    depths, depth = search.depths, search.depth
    for trials in search.trials:
        trials.fill([depth] if search.briefly else sorted({depths[0], min(depth, depths[-1]), depths[-1]}))
    search.trials.sort(key=Trials.order)  # stable: packings that are equally good stay in order of capacity


def begin_early(search: _Search) -> None:
    """Every packing, with early updates: as many states on the host as backward seems to hide."""
    space, found, plain_s = search.space, search.found, search.found.best_s
    if space.setting.early_updates is False or space.cost.clipped or found.best is None:
        return
    for trials in search.trials[:SIZES_PLACED]:
        early = None if trials.best is None else updated_early(trials.best, search.budgets)
        found.take([] if early is None else [early])
    # With a disk, what the host has more of would go there.
    some = [] if space.setting.spill else search.trials[: SIZES_KEPT if search.briefly else None]
    first = search.ahead[len(search.ahead) > 1]
    floors_s = {trials: trials.early.look(trials.depth(first), search.ahead[0]) for trials in some}
    for trials in sorted(some, key=lambda trials: floors_s[trials]):
        if floors_s[trials] < found.best_s * LITTLE_LESS:
            trials.early.begin(search.ahead)
    search.early = sorted((each for each in some if each.early.best), key=lambda trials: trials.early.best_s)
    search.early_suffices = found.best_s <= plain_s * MUCH_LESS


def vary(search: _Search) -> None:
    """Three best packings: vary depth of prefetch and block count, in ever smaller steps."""
    for trials in () if search.early_suffices else search.trials[: 1 if search.briefly else SIZES_KEPT]:
        trials.vary(search.depths)
    search.trials.sort(key=Trials.order)


def place(search: _Search) -> None:
    """Two best packings: change homes chunk by chunk; all packings with few chunks: try all homes."""
    if search.found.best is None and search.found.least_host is not None:
        # Some fit the device, but what they leave to the host does not fit there.
        for trials in sorted(search.trials, key=lambda trials: trials.least_host_bytes)[:PACKINGS_FOR_HOST]:
            trials.spare_host(search.depths[0])
    if search.early_suffices or (search.briefly and not search.trials[0].few_chunks):
        return
    if search.known:
        _change_homes(search, early=False)
        return
    for place, trials in enumerate(search.trials):
        trials.place(search.depths, closely=place < SIZES_PLACED)


def vary_early(search: _Search) -> None:
    """Three best packings with early updates: vary the number of states on the host, depth and block count."""
    chunks = 0
    for place, trials in enumerate(search.early):
        chunks += len(trials.model.work.chunks)
        if place < (1 if search.briefly else SIZES_KEPT) or not (search.briefly or chunks > EARLY_CHUNKS):
            trials.early.vary(search.ahead)


def fill_less(search: _Search) -> None:
    """The best with early updates: fill three quarters of the device, and leave the host fewer states."""
    best = min((trials.early for trials in search.early), key=lambda early: early.best_s, default=None)
    if best is not None and not search.briefly and best.best_s == search.found.best_s:
        best.fill_less()


def place_early(search: _Search) -> None:
    """The best, if it has early updates and few chunks: change homes, and when each is updated, chunk by chunk."""
    best, setting = search.found.best, search.space.setting
    if best is None or not best.placement.early or setting.spill or len(best.work.chunks) > FEW_CHUNKS:
        return
    _change_homes(search, early=True)


def _change_homes(search: _Search, *, early: bool) -> None:
    """Changes homes chunk by chunk, from the best of all; updates all chunks after the norm unless `early`."""
    best, several = search.found.best, search.space.setting.world_size > 1
    if best is None:
        return
    gathered = several and all(best.placement.resident)
    local = LocalSearch(
        best.model, search.budgets, search.space.cost, gathered=gathered, early=early, briefly=bool(search.known)
    )
    better = local.better([best if early else best.after_norm], (search.depth,) if early else search.depths)
    search.found.take([] if better is None else [better])


Round = Callable[[_Search], None]
FIRST_LOOK: tuple[Round, ...] = (keep_everything, fill, begin_early)
"""Tells which of several steps has the faster plan, in a tenth of the time."""
ROUNDS: tuple[Round, ...] = (*FIRST_LOOK, vary, place, vary_early, fill_less, place_early)
"""In this order; each knows what those before it have found."""
