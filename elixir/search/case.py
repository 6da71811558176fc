"""What is replayed: a placement with its schedule, the work of a packing, and the chunks that lie in blocks from before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elixir.schedule import ScheduleResult, StepSchedule
from elixir.search.memory import MemoryModel, Placement
from elixir.search.replay import Machine
from elixir.search.work_times import Events, WorkTimes


@dataclass(frozen=True)
class Case:
    """What is replayed."""

    times: WorkTimes
    placement: Placement
    schedule: StepSchedule
    result: ScheduleResult
    grad_blocks: int
    overlap: bool
    ahead: bool
    in_backward: frozenset[int] = frozenset()
    """Chunks that the host updates as soon as their gradients are there."""

    def machine(self, *, record: bool) -> Machine:
        return Machine(
            self.times,
            self.placement,
            self.grad_blocks,
            overlap=self.overlap,
            ahead=self.ahead,
            record=record,
            in_backward=self.in_backward,
        )

    def events(self, loads: Sequence[tuple[int, int]], *, updated: bool, record: bool = False) -> Events:
        return self.times.events(self.placement, self.schedule, loads, updated=updated, record=record)

    def loads_of_batches(self, count: int) -> list[tuple[tuple[int, int], ...]]:
        """Loads of each batch of a step: the blocks are empty before the first only, since weights change between steps."""
        found = [self.result.timeline]
        if count == 1:
            return found
        residents: list[int] = []
        for batch in range(count):
            loads, residents = _walk(self.schedule, self.result.blocks, residents)
            if batch:
                found.append(loads)
        return found


def disk_bytes(model: MemoryModel) -> list[int]:
    """By chunk, what one rank keeps of it on the disk if its states live there."""
    return [model.disk_shard_bytes(chunk) for chunk in range(len(model.work.chunks))]


def _walk(
    schedule: StepSchedule, blocks: int, residents: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], list[int]]:
    """`StepSchedule.simulate` with chunks in the blocks already; its loads, and what is in the blocks at the end."""
    cache = schedule.policy.start()
    for chunk in residents:
        cache.admit(chunk)
    loads = []
    for position, window in enumerate(schedule.windows):
        for chunk in window:
            if chunk in cache.residents:
                continue
            if len(cache.residents) == blocks:
                victim = cache.victim()
                if victim is not None:
                    cache.evict(victim)
            cache.admit(chunk)
            loads.append((position, chunk))
        cache.passed(position)
    return tuple(loads), sorted(cache.residents)
