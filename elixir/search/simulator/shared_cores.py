"""A CPU as the device: its lanes take cores, caches and memory from compute, which loses time by all that they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from elixir.search.simulator.case import Case
from elixir.search.simulator.replay import COMPUTE, DISK, Handler, Replay
from elixir.search.simulator.work_times import ENTRY, Events


def _delayed(handler: Handler) -> Handler:
    return lambda self, chunk, now_s: handler(self, chunk, self.after_loss(now_s))


class SharedCores(Replay):
    """`Replay` whose compute takes longer by `Rates.contention` of every second of a lane, the disk's left out.

    Compute loses it where work is submitted, all at once: when the lane comes to it nobody knows before. Where compute
    waits for lanes later, it waits that much less.
    """

    HANDLERS: ClassVar[Mapping[int, Handler]] = {
        # Entries are only for the record, without which seconds must be the same.
        kind: handler if kind == ENTRY else _delayed(handler)
        for kind, handler in Replay.HANDLERS.items()
    }

    def __init__(self, case: Case, *, record: bool) -> None:
        super().__init__(case, record=record)
        self._contention = self._times.rates.contention
        self._lost_s = 0.0

    def batch(self, events: Events) -> None:
        """Forward and backward of one batch."""
        super().batch(events)
        self.now_s = self.after_loss(self.now_s)
        self._computed(self.now_s)

    def after_loss(self, now_s: float) -> float:
        """The time at which compute comes there, having lost what lanes were given since the last question."""
        lost_s, self._lost_s = self._lost_s, 0.0
        self.busy_s[COMPUTE] += lost_s
        return now_s + lost_s

    def _run(self, lane: str, name: str, c: int | None, submitted_s: float, seconds: float) -> float:
        if lane != DISK:
            self._lost_s += self._contention * seconds
        return super()._run(lane, name, c, submitted_s, seconds)


def machine_of(case: Case, *, record: bool = False) -> Replay:
    """The machine on which a case is replayed."""
    return (SharedCores if case.times.rates.contention else Replay)(case, record=record)
