"""The search: sizes, block counts and homes; the fastest candidate that fits and moves no more than the first Elixir.

How the promise on traffic is kept: the first Elixir's own choice is a candidate. Its bytes are the cap; a candidate
that moves more over the link is dropped, however fast it looks. So the cap never makes a search infeasible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elixir.search.candidate import Candidate, everything_resident, settle
from elixir.search.classic import classic_candidates
from elixir.search.homes import PlacementBuilder, by_saving, loads_per_chunk
from elixir.search.memory import MemoryModel
from elixir.search.space import Budgets, SearchSpace

BLOCK_STEPS = 8
"""Block counts are tried at so many even steps between the fewest legal and the most that fit."""
SIZES_KEPT = 3
"""Sizes that are looked at closer after a first look at all, with fewest and most blocks."""


@dataclass(frozen=True)
class Outcome:
    """What a search found, and how near to feasible it came."""

    best: Candidate | None
    candidates: int
    least_host: Candidate | None
    """Of those that fit the device, the one that needs the least host memory."""


def find_best(
    space: SearchSpace, budgets: Budgets, sizes: Iterable[int], prefetch_depth: int, *, capped: bool
) -> Outcome:
    """Search `sizes` with every placement.

    Args:
        space: what is searched.
        budgets: what a plan may use.
        sizes: chunk capacities in bytes.
        prefetch_depth: chunks fetched ahead.
        capped: drop candidates that move more than the first Elixir would.
    """
    classic = classic_candidates(space, budgets.device_bytes, prefetch_depth) if capped else []
    fitting = [candidate for candidate in classic if candidate.need.host_bytes <= budgets.host_bytes]
    cap = min((candidate.moved.link_bytes for candidate in fitting), default=None)
    # Capacities that pack alike share a model, which the first of them names.
    models = {model.work.packing.capacity_bytes: model for model in (space.model(size) for size in sizes)}
    for candidate in fitting:
        capacity = candidate.work.packing.capacity_bytes
        models[capacity] = space.model(capacity)
    found = _Collection(budgets.host_bytes, cap, fitting, least_host=min(classic, key=_by_host, default=None))
    first: list[tuple[Candidate, MemoryModel, range]] = []
    for model in models.values():
        resident = everything_resident(model, budgets.device_bytes, space.cost)
        if resident is not None:
            found.take([resident])
        counts = block_range(space, model, budgets.device_bytes, prefetch_depth)
        looked = found.take(_at(space, model, budgets, sorted({counts.start, counts.stop - 1}), prefetch_depth))
        if looked is not None:
            first.append((looked, model, counts))
    first.sort(key=lambda item: item[0].rank)
    for _, model, counts in first[:SIZES_KEPT]:
        span = counts.stop - 1 - counts.start
        inner = {counts.start + span * step // BLOCK_STEPS for step in range(1, BLOCK_STEPS)}
        found.take(_at(space, model, budgets, sorted(inner - {counts.start, counts.stop - 1}), prefetch_depth))
    return found.outcome()


def block_range(space: SearchSpace, model: MemoryModel, device_bytes: int, prefetch_depth: int) -> range:
    """Legal block counts when all that can be streamed is; the one fewest count where not even that fits."""
    builder = PlacementBuilder(model, 0)
    fewest = model.work.schedule(builder.placement().residents, prefetch_depth).min_blocks
    most = builder.most_blocks(device_bytes)
    return range(fewest, max(most, fewest) + 1)


def _at(
    space: SearchSpace, model: MemoryModel, budgets: Budgets, counts: Iterable[int], prefetch_depth: int
) -> Iterator[Candidate]:
    """Candidates of one packing with the given block counts, each with several ways of choosing homes."""
    for blocks in counts:
        seen = set()
        for builder in _placed(space, model, blocks, budgets.device_bytes, prefetch_depth):
            placement = builder.placement()
            if placement not in seen:
                seen.add(placement)
                candidate = settle(model, builder, prefetch_depth, budgets.device_bytes, space.cost)
                if candidate is not None:
                    yield candidate


def _placed(
    space: SearchSpace, model: MemoryModel, blocks: int, device_bytes: int, prefetch_depth: int
) -> Iterator[PlacementBuilder]:
    single = space.setting.world_size == 1
    use_order = range(len(model.work.chunks))
    plain = PlacementBuilder(model, blocks)
    if not plain.squeeze(device_bytes):
        return
    plain.move_all(use_order, state=True, resident=single, budget_bytes=device_bytes)
    if not single:
        plain.move_all(_without(plain.weight), state=False, resident=False, budget_bytes=device_bytes)
    yield plain
    saving = PlacementBuilder(model, blocks)
    schedule = model.work.schedule(saving.placement().residents, prefetch_depth)
    if blocks < schedule.min_blocks or not saving.squeeze(device_bytes):
        return
    loads = loads_per_chunk(len(use_order), schedule.simulate(blocks).timeline)
    if not single:
        wanted = [chunk for chunk in by_saving(model, loads, whole=False) if loads[chunk] > 1]
        saving.move_all(wanted, state=False, resident=False, budget_bytes=device_bytes)
    order = by_saving(model, loads, whole=True)
    saving.move_all(order, state=True, resident=single, budget_bytes=device_bytes)
    yield saving


def _without(flags: list[bool]) -> list[int]:
    return [index for index, flag in enumerate(flags) if not flag]


class _Collection:
    """Keeps the best of what it is shown."""

    def __init__(
        self, host_bytes: int, cap: int | None, candidates: list[Candidate], *, least_host: Candidate | None
    ) -> None:
        self._host_bytes = host_bytes
        self._cap = cap
        self._best = min(candidates, key=lambda candidate: candidate.rank, default=None)
        if self._best is not None and cap is not None and self._best.moved.link_bytes > cap:
            self._best = min(candidates, key=lambda candidate: (candidate.moved.link_bytes, candidate.rank))
        self._least_host = least_host
        self._count = len(candidates)

    def take(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """Look at candidates; the best of these that is allowed."""
        best: Candidate | None = None
        for candidate in candidates:
            self._count += 1
            if self._least_host is None or _by_host(candidate) < _by_host(self._least_host):
                self._least_host = candidate
            if candidate.need.host_bytes > self._host_bytes:
                continue
            if self._cap is not None and candidate.moved.link_bytes > self._cap:
                continue
            if best is None or candidate.rank < best.rank:
                best = candidate
        if best is not None and (self._best is None or best.rank < self._best.rank):
            self._best = best
        return best

    def outcome(self) -> Outcome:
        return Outcome(self._best, self._count, self._least_host)


def _by_host(candidate: Candidate) -> tuple[int, tuple[float, ...]]:
    return candidate.need.host_bytes, candidate.rank
