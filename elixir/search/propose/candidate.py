"""One complete proposal: a packing, homes, blocks, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from elixir.plan import Home
from elixir.schedule import ScheduleResult
from elixir.search.problem import MemoryModel, MemoryNeed, Placement, Traffic, Workload, traffic
from elixir.search.propose.disk_overflow import spilled
from elixir.search.propose.greedy import PlacementBuilder
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.simulator import SimulatedCost

NEAR = 1.01
"""A plan that takes this many times the fastest one's seconds is as good, as far as rates are known."""
_UNDO = "undo"
"""Part of host memory: new states next to the old ones, of chunks that speculate."""


@dataclass(frozen=True)
class Candidate:
    """A proposal with its consequences."""

    work: Workload
    placement: Placement
    schedule: ScheduleResult
    need: MemoryNeed
    moved: Traffic
    seconds: Mapping[str, float]
    overlap: bool
    speculating: frozenset[int] = frozenset()
    """Chunks whose new states the host makes in backward next to the old ones."""

    @cached_property
    def sort_key(self) -> tuple[float, int, int, int, int, int, int, int]:
        """Sorts candidates: fastest first, then fewest elements that the host steps, fewest bytes over its link, least
        memory, fewest chunks.

        Seconds are compared to a nanosecond, so that the last bits of a sum decide nothing.
        """
        chunks = zip(self.work.chunks, self.placement.state_on_device, strict=True)
        return (
            round(self.seconds["total"], 9),
            sum(chunk.numel for chunk, on_device in chunks if chunk.grad_bytes and not on_device),
            self.moved.link_bytes,
            self.need.device_bytes,
            self.need.host_bytes,
            self.moved.network_bytes,
            -self.work.packing.capacity_bytes,
            self.schedule.blocks,
        )

    def seconds_by(self, cost: SimulatedCost) -> Mapping[str, float]:
        """Seconds of the same step by another cost, as of a machine with other rates."""
        return cost.estimate(
            self.work, self.placement, self.schedule, overlap=self.overlap, speculating=self.speculating
        )


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


def weigh(
    model: MemoryModel,
    placement: Placement,
    blocks: int,
    prefetch_depth: int,
    cost: SimulatedCost,
    early: frozenset[int] = frozenset(),
) -> Candidate:
    """The candidate with exactly this placement and block count, which must be legal; but for states that `spilled`
    puts on the disk, where the search may use it. The chunks `early`, with states on the host, speculate."""
    drawn = draw(model, placement, blocks, prefetch_depth)
    seconds = cost.estimate(
        drawn.work, drawn.placement, drawn.schedule, overlap=model.setting.overlap, speculating=early
    )
    return _speculating(model, drawn, early, seconds)


def draw(model: MemoryModel, placement: Placement, blocks: int, prefetch_depth: int) -> Candidate:
    """As `weigh`, with no chunk speculating, and without the seconds."""
    work, placement = model.work, spilled(model, placement)
    schedule = work.schedule(placement.residents, prefetch_depth)
    moved = traffic(model, placement, schedule, blocks)
    result, need = schedule.simulate(blocks), model.need(placement, blocks)
    return Candidate(work, placement, result, need, moved, {}, model.setting.overlap)


def speculating(space: SearchSpace, plain: Candidate, budgets: Budgets) -> Candidate | None:
    """`plain`, of which no chunk speculates, with those speculating with which its step is shortest; None if none can,
    or the host has no memory for that.

    No chunk gets another home. Unless the user asked for it, memory for the copies of a checkpoint comes first.
    """
    if space.setting.speculate is False:
        return None
    model = space.model(plain.work.packing.capacity_bytes)
    left = left_to_speculate(space, plain, budgets)
    found = space.cost.speculating(
        plain.work,
        plain.placement,
        plain.schedule,
        overlap=plain.overlap,
        left_bytes=left,
        needed=model.second_set_bytes,
    )
    return None if found is None else _speculating(model, plain, *found)


def left_to_speculate(space: SearchSpace, candidate: Candidate, budgets: Budgets) -> int:
    """Host bytes of a machine for new states of all chunks that speculate."""
    parts = candidate.need.host_parts
    left_bytes = budgets.host_bytes - candidate.need.host_bytes + parts.get(_UNDO, 0)
    if space.setting.speculate is None:
        left_bytes -= space.model(candidate.work.packing.capacity_bytes).copies_bytes
    return left_bytes


def as_it_runs(space: SearchSpace, plain: Candidate, budgets: Budgets, enough_s: float = 0.0) -> Candidate:
    """`plain`, or the same with chunks speculating if that makes the step shorter.

    Without a wish of the user `plain` stays as it is if its step takes at most `enough_s`, or `NEAR` times as long:
    rates are not known well enough to give memory for less.
    """
    asked = bool(space.setting.speculate)
    if not asked and plain.seconds["total"] <= enough_s:
        return plain
    early = speculating(space, plain, budgets)
    least_gain = 1.0 if asked else NEAR
    return plain if early is None or plain.seconds["total"] <= early.seconds["total"] * least_gain else early


def _speculating(
    model: MemoryModel, plain: Candidate, chunks: frozenset[int], seconds: Mapping[str, float]
) -> Candidate:
    if not chunks:
        return replace(plain, seconds=seconds)
    undo = sum(model.second_set_bytes[chunk] for chunk in chunks)
    need = replace(plain.need, host_parts={**plain.need.host_parts, _UNDO: undo})
    return replace(plain, need=need, seconds=seconds, speculating=chunks)


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
