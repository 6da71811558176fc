"""One complete proposal: a packing, homes, blocks, and what they cost; states that the host cannot hold on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from elixir.plan.plan import WINDOW_CHUNKS
from elixir.schedule import ScheduleResult
from elixir.search.problem.memory_model import BytesMoved, MemoryModel, MemoryNeed
from elixir.search.problem.packed_step import PackedStep
from elixir.search.problem.placement import Placement, Spill
from elixir.search.propose.sizes import Budgets
from elixir.search.simulator.simulated_cost import SimulatedCost


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
        return self.model.traffic(self.placement, schedule, self.schedule.blocks)

    @cached_property
    def hosted_numel(self) -> int:
        """Elements that the host steps."""
        chunks = zip(self.work.chunks, self.placement.state_on_device, strict=True)
        return sum(chunk.numel for chunk, on_device in chunks if chunk.grad_bytes and not on_device)

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

    def seconds_by(self, cost: SimulatedCost) -> Mapping[str, float]:
        """Seconds of the same step by another cost, as of a machine with other rates."""
        return cost.estimate(self.model, self.placement, self.schedule)


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


class _Choice(NamedTuple):
    """Chunks whose states are on the disk."""

    chunks: frozenset[int]
    saved_bytes: int
    """Host bytes of one machine, the window subtracted."""
    disk_bytes: int


def spilled(model: MemoryModel, placement: Placement, *, host_bytes: int | None = None) -> Placement:
    """The placement with states on the disk where `Setting.spill` allows it and the host cannot hold them.

    States that no update needs go first, then those of chunks that forward asks for last: the disk has most time for
    these. An outsized chunk needs a window of twice its size, so a choice without outsized chunks is tried as well, and
    the one that needs less of the disk is taken. If neither is enough, the one that saves more is taken.

    Args:
        model: of the packing; its chunks are numbered in order of use.
        placement: homes on device and host, none on the disk.
        host_bytes: budget of the host, instead of that of `Setting.spill`.
    """
    spill = model.setting.spill
    if spill is None:
        return placement
    budget = spill.host_bytes if host_bytes is None else host_bytes
    lacking = sum(model.host_parts(placement).values()) - budget
    if lacking < 1:
        return placement
    chunks = model.work.chunks
    able = [c for c, facts in enumerate(chunks) if facts.trainable and not placement.state_on_device[c]]
    order = sorted(able, key=lambda chunk: (chunks[chunk].grad_bytes > 0, -chunk))
    found = [
        _filled(model, placement, spill, lacking, some)
        for some in (order, [chunk for chunk in order if not chunks[chunk].outsized])
    ]
    best = min(found, key=lambda choice: (max(lacking - choice.saved_bytes, 0), choice.disk_bytes))
    if best.saved_bytes <= 0:
        return placement
    return Placement(tuple(home.having("disk") if c in best.chunks else home for c, home in enumerate(placement.homes)))


def _filled(model: MemoryModel, placement: Placement, spill: Spill, lacking: int, order: Iterable[int]) -> _Choice:
    """Chunks in `order` until so many bytes are saved, the disk's budget permitting; then without those not needed."""
    ranks = model.setting.ranks_per_host
    leaving = model.host_states[np.arange(len(placement.codes)), placement.codes].tolist()
    chosen: dict[int, tuple[int, int]] = {}  # bytes on the disk, and bytes that leave the host
    freed = largest = on_disk = saved = 0
    for chunk in order:
        size = int(model.disk_shard_bytes[chunk])
        if ranks * (on_disk + size) > spill.disk_bytes:
            continue
        chosen[chunk] = size, leaving[chunk]
        on_disk += size
        freed += chosen[chunk][1]
        largest = max(largest, size)
        saved = ranks * (freed - min(len(chosen), WINDOW_CHUNKS) * largest)
        if saved >= lacking:
            break
    # The last one may have saved more than was still lacking; the largest that can do without the disk goes back.
    for chunk, (size, leaves) in sorted(chosen.items(), key=lambda item: (-item[1][0], item[0])):
        if len(chosen) > WINDOW_CHUNKS and saved - ranks * leaves >= lacking:
            saved -= ranks * leaves
            on_disk -= size
            del chosen[chunk]
    return _Choice(frozenset(chosen), saved, ranks * on_disk)
