"""One complete proposal: a packing, homes, blocks, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, total_ordering
from operator import attrgetter

from elixir.plan.chunk_plan import Home
from elixir.schedule import ScheduleResult
from elixir.search.problem.bytes_moved import BytesMoved, traffic
from elixir.search.problem.memory_model import MemoryModel, MemoryNeed
from elixir.search.problem.packed_step import PackedStep
from elixir.search.problem.placement import Placement
from elixir.search.propose.climb import DECIMALS, Key
from elixir.search.propose.disk_overflow import spilled
from elixir.search.propose.greedy import PlacementBuilder
from elixir.search.propose.sizes import Budgets
from elixir.search.simulator.simulated_cost import SimulatedCost
from elixir.units import LARGEST_BYTES


@dataclass(frozen=True)
class Candidate:
    """A proposal with its consequences."""

    model: MemoryModel
    placement: Placement
    schedule: ScheduleResult
    cost: SimulatedCost

    @property
    def work(self) -> PackedStep:
        """Its packing of the step."""
        return self.model.work

    @property
    def overlap(self) -> bool:
        """Whether gradients may leave during backward."""
        return self.model.setting.overlap

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of a step by phase and by resource, and ``total``: simulated when they are asked for."""
        return self.seconds_by(self.cost)

    @cached_property
    def need(self) -> MemoryNeed:
        """Bytes of device, host and disk."""
        return self.model.need(self.placement, self.schedule.blocks)

    @cached_property
    def moved(self) -> BytesMoved:
        """Bytes that a step moves."""
        schedule = self.work.schedule(self.placement.residents, self.schedule.prefetch_depth)
        return traffic(self.model, self.placement, schedule, self.schedule.blocks)

    @cached_property
    def hosted_numel(self) -> int:
        """Elements that the host steps."""
        chunks = zip(self.work.chunks, self.placement.state_on_device, strict=True)
        return sum(chunk.numel for chunk, on_device in chunks if chunk.grad_bytes and not on_device)

    @property
    def sort_key(self) -> Key:
        """Sorts candidates: fastest first, then by `thrift`, which is worked out when two candidates are as fast.

        Seconds are compared to a nanosecond, so that the last bits of a sum decide nothing.
        """
        return round(self.seconds["total"], DECIMALS), _Thrift(self)

    @cached_property
    def thrift(self) -> tuple[int, ...]:
        """Sorts candidates that are as fast: fewest elements that the host steps, fewest bytes over its link, least
        memory, fewest chunks."""
        return (
            self.hosted_numel,
            self.moved.link_bytes,
            self.need.device_bytes,
            self.need.host_bytes,
            self.moved.network_bytes,
            -self.work.packing.capacity_bytes,
            self.schedule.blocks,
        )

    @property
    def after_norm(self) -> Candidate:
        """The same, with all chunks updated after the norm."""
        return replace(self, placement=self.placement.updated_early(()))

    def seconds_by(self, cost: SimulatedCost) -> Mapping[str, float]:
        """Seconds of the same step by another cost, as of a machine with other rates."""
        return cost.estimate(self.work, self.placement, self.schedule, overlap=self.overlap)


@total_ordering
class _Thrift:
    """Compares `Candidate.thrift`."""

    __slots__ = ("_candidate",)

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate  # which keeps no `_Thrift`: a circle would wait for the collection of garbage

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Thrift):
            return False
        return self._candidate is other._candidate or self._candidate.thrift == other._candidate.thrift

    def __lt__(self, other: _Thrift) -> bool:
        return self._candidate.thrift < other._candidate.thrift

    __hash__ = None  # type: ignore[assignment]


def settled(
    model: MemoryModel, builder: PlacementBuilder, prefetch_depth: int, budget_bytes: int
) -> tuple[Placement, int] | None:
    """The placement of a builder, with as many blocks as fit now; None if the smallest legal number does not."""
    most = builder.most_blocks(budget_bytes)
    placement = _gathered_for_good(model, builder.placement(), most)
    fewest = model.work.schedule(placement.residents, prefetch_depth).min_blocks
    # Where everything is resident nothing is streamed, and no block is needed.
    blocks = min(most, builder.streamed) if fewest else 0
    return None if most < 0 or blocks < fewest else (placement, blocks)


def weigh(model: MemoryModel, placement: Placement, blocks: int, prefetch_depth: int, cost: SimulatedCost) -> Candidate:
    """The candidate with exactly this placement and block count, which must be legal; but for states that `spilled`
    puts on the disk, where the search may use it."""
    placement = spilled(model, placement)
    return Candidate(model, placement, model.work.schedule(placement.residents, prefetch_depth).simulate(blocks), cost)


def early_host_bytes(model: MemoryModel, budgets: Budgets) -> int:
    """Host bytes that a plan may take some of whose chunks are updated early.

    Unless the user asked for early updates, memory for the copies of a checkpoint comes first.
    """
    return budgets.host_bytes - (model.copies_bytes if model.setting.early_updates is None else 0)


def updated_early(plain: Candidate, budgets: Budgets) -> Candidate | None:
    """`plain`, which updates all chunks after the norm, with those updated early with which the step is shortest; None
    if none can be, or the host has no memory for that. No chunk lives elsewhere."""
    model = plain.model
    if model.setting.early_updates is False:
        return None
    left_bytes = early_host_bytes(model, budgets) - sum(model.host_parts(plain.placement).values())
    choices = plain.cost.early_choices(
        model.work, plain.placement, plain.schedule, overlap=plain.overlap, left_bytes=left_bytes
    )
    found = (replace(plain, placement=choice) for choice in choices)
    return min(found, key=lambda candidate: candidate.seconds["total"], default=None)


def everything_resident(model: MemoryModel, budget_bytes: int, cost: SimulatedCost) -> Candidate | None:
    """All weights gathered on the device and all states there, no block; None where that does not fit."""
    placement = Placement.everywhere(Home.RESIDENT, len(model.work.chunks))
    if model.need(placement, 0).device_bytes > budget_bytes:
        return None
    return weigh(model, placement, 0, 0, cost)


def _gathered_for_good(model: MemoryModel, placement: Placement, blocks: int) -> Placement:
    """Several ranks: with a block for every streamed chunk and all shards on the device, all chunks are resident.

    Exact chunk sizes take the place of whole blocks, and the shard is part of the gathered chunk, so this needs less.
    """
    streamed = placement.resident.count(False)
    if model.setting.world_size == 1 or not streamed or blocks < streamed or not all(placement.weight_on_device):
        return placement
    return Placement(tuple(Home.RESIDENT if home.states_on_device else Home.RESIDENT_HOST for home in placement.homes))


class Found:
    """Keeps the best of what it is shown."""

    def __init__(self, budgets: Budgets, candidates: Iterable[Candidate]) -> None:
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
        """Looks at candidates; the best of those that fit the host."""
        taken = list(candidates)
        fitting = [candidate for candidate in taken if candidate.need.host_bytes <= self._host_bytes]
        best = min(fitting, key=_by_seconds, default=None)
        self.best = _least(_by_seconds, self.best, best)
        self.resident = _least(_by_seconds, self.resident, *(c for c in fitting if c.placement.keeps_everything))
        self.least_host = _least(lambda c: (c.need.host_bytes, *c.sort_key), self.least_host, *taken)
        return best


_by_seconds = attrgetter("sort_key")


def _least(key: Callable[[Candidate], Key], *candidates: Candidate | None) -> Candidate | None:
    return min((candidate for candidate in candidates if candidate is not None), key=key, default=None)
