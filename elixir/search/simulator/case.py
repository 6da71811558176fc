"""The case of a replay: a placement with its schedule, the work of a packing, and the chunks that lie in blocks from
before."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from elixir.schedule import ScheduleResult, StepSchedule
from elixir.search.problem.placement import Placement
from elixir.search.simulator.events import Events, WorkTimes
from elixir.search.simulator.replay import Machine
from elixir.search.simulator.shared_cores import SharedCores


@dataclass(frozen=True)
class Case:
    """The placement, schedule and work that are replayed."""

    times: WorkTimes
    placement: Placement
    schedule: StepSchedule
    result: ScheduleResult
    grad_blocks: int
    overlap: bool
    ahead: bool
    early_share: float = 1.0
    """Seconds of an early update over one in place."""
    clipping: bool = False
    """Whether a step reads the norm of all gradients."""
    accumulates: bool = False
    """Whether a step has several batches."""
    clipped: bool = False
    """Whether gradients turn out to be clipped, so that states made in backward are made again."""

    def machine(self, *, record: bool) -> Machine:
        kind = SharedCores if self.times.rates.contention else Machine
        return kind(
            self.times,
            self.placement,
            self.grad_blocks,
            overlap=self.overlap,
            ahead=self.ahead,
            record=record,
            early_share=self.early_share,
            clipping=self.clipping,
            accumulates=self.accumulates,
            clipped=self.clipped,
        )

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
        for batch, (before, walk) in enumerate(pairwise(walks)):
            alike = walk is before and (batch > 0 or first is None)
            found.append(found[-1] if alike else self.events(walk, updated=False))
        return found
