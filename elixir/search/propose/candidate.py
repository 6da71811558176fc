"""One complete proposal: a packing, homes, blocks, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from elixir.schedule import ScheduleResult
from elixir.search.problem.bytes_moved import BytesMoved, traffic
from elixir.search.problem.memory_model import MemoryModel, MemoryNeed
from elixir.search.problem.packed_step import PackedStep
from elixir.search.problem.placement import Placement
from elixir.search.propose.disk_overflow import spilled
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
