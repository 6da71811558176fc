"""A CPU as the device: its lanes take cores, caches and memory from compute, which loses time by all that they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elixir.search.simulator.events import ENTRY, Events
from elixir.search.simulator.replay import COMPUTE, DISK, Machine


class SharedCores(Machine):
    """`Machine` whose compute takes longer by `Rates.contention` of every second of a lane, the disk's left out.

    Compute loses it where work is submitted, all at once: when the lane comes to it nobody knows before. Where compute
    waits for lanes later, it waits that much less. Arguments are those of `Machine`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._contention = self._times.rates.contention
        self._lost_s = 0.0
        self._handlers = {
            # Entries are only for the record, without which seconds must be the same.
            kind: handler if kind == ENTRY else self._delayed(handler)
            for kind, handler in self._handlers.items()
        }

    def batch(self, events: Events) -> None:
        """Forward and backward of one batch."""
        super().batch(events)
        self.now_s = self._after_loss(self.now_s)
        self._computed(self.now_s)

    def _delayed(self, handler: Callable[[int, float], float]) -> Callable[[int, float], float]:
        return lambda chunk, now_s: handler(chunk, self._after_loss(now_s))

    def _after_loss(self, now_s: float) -> float:
        """When compute comes there, having lost what lanes were given since it was asked last."""
        lost_s, self._lost_s = self._lost_s, 0.0
        self.busy_s[COMPUTE] += lost_s
        return now_s + lost_s

    def _run(self, lane: str, name: str, c: int, submitted_s: float, seconds: float) -> float:
        if lane != DISK:
            self._lost_s += self._contention * seconds
        return super()._run(lane, name, c, submitted_s, seconds)
