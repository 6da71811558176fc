"""The case of a replay: a placement with its schedule, and the work of a packing."""

from __future__ import annotations

from dataclasses import dataclass

from elixir.schedule import Schedule, ScheduleResult
from elixir.search.problem.placement import Placement
from elixir.search.simulator.work_times import Events, WorkTimes


@dataclass(frozen=True)
class Case:
    """The placement, schedule and work that are replayed."""

    times: WorkTimes
    """Seconds of every piece of work."""
    placement: Placement
    schedule: Schedule
    result: ScheduleResult
    """The walk of the first batch."""
    grad_blocks: int
    """Gradient blocks of the plan."""
    clipped: bool = False
    """Whether gradients turn out to be clipped, so that states made early are discarded and made again."""

    def batches(self, count: int, *, updated: bool, record: bool = False) -> list[Events]:
        """Events of each batch of a step.

        The blocks are empty before the first only, since weights change between steps. Batches that find the same
        chunks in the blocks have the same walk, and so the same events.

        Args:
            count: batches.
            updated, record: those of `WorkTimes.events`, the former for the first batch.
        """
        found: list[Events] = []
        walk, before = self.result, None
        for batch in range(count):
            if batch:
                walk = self.schedule.simulate(self.result.blocks, walk.left)
            after_step = updated and not batch
            if walk is before:
                found.append(found[-1])
            else:
                found.append(self.times.events(self.placement, self.schedule, walk, updated=after_step, record=record))
            before = None if after_step else walk
        return found
