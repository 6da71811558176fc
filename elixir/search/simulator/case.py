"""The case of a replay: a placement with its schedule, the work of a packing, and the chunks that lie in blocks from
before."""

from __future__ import annotations

from dataclasses import dataclass

from elixir.schedule import Schedule, ScheduleResult
from elixir.search.problem.placement import Placement
from elixir.search.simulator.work_times import Events, WorkTimes


@dataclass(frozen=True)
class Case:
    """The placement, schedule and work that are replayed, and the modes of the step."""

    times: WorkTimes
    """Seconds of every piece of work."""
    placement: Placement
    schedule: Schedule
    result: ScheduleResult
    grad_blocks: int
    """Gradient blocks of the plan."""
    overlap: bool
    """Whether gradients may leave during backward."""
    ahead: bool
    """Whether the thread that submits does not wait for compute, as on CUDA: updates on the host begin during those of
    the device."""
    early_share: float = 1.0
    """Seconds of an early update, which keeps the old states, over one in place."""
    clipping: bool = False
    """Whether a step reads the norm of all gradients before it updates anything."""
    accumulates: bool = False
    """Whether a step has several batches; then the pass that adds gradients sums what leaves for the host."""
    clipped: bool = False
    """Whether gradients turn out to be clipped, so that states made early are discarded and made again."""

    def events(self, walk: ScheduleResult, *, updated: bool, record: bool = False) -> Events:
        return self.times.events(self.placement, self.schedule, walk, updated=updated, record=record)

    def walks(self, count: int) -> list[ScheduleResult]:
        """The walk of each batch of a step: the blocks are empty before the first only, since weights change between
        steps."""
        walks = [self.result]
        while len(walks) < count:
            walks.append(self.schedule.simulate(self.result.blocks, walks[-1].left))
        return walks

    def batches(self, count: int, first: Events | None = None) -> list[Events]:
        """Events of each batch of a step; `first` are those of the first, if an update came before it.

        Batches that find the same chunks in the blocks have the same walk, and so the same events.
        """
        walks = self.walks(count)
        found = [self.events(walks[0], updated=False) if first is None else first]
        before = walks[0] if first is None else None
        for walk in walks[1:]:
            found.append(found[-1] if walk is before else self.events(walk, updated=False))
            before = walk
        return found
