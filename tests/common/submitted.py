"""Observes and simulates the order in which the runtime loads chunks, and opens and sends gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from elixir.chunk.chunk import Chunk
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import Plan
from elixir.search.problem.from_plan import packed_step_of, placement_of, setting_of
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.simulator.simulated_cost import SimulatedCost
from elixir.search.simulator.work_times import LOAD, OPEN, SEND
from elixir.step_trace import StepTrace
from tests.common import inside

_METHODS = ((*inside.LOADS, LOAD), (*inside.OPENS, OPEN), (*inside.SENDS, SEND))


@contextlib.contextmanager
def watching() -> Iterator[list[tuple[int, int]]]:
    """A list that fills with (kind, chunk) as the runtime's own methods are called; for one module at a time."""
    seen: list[tuple[int, int]] = []
    originals = [getattr(owner, name) for owner, name, _ in _METHODS]

    def watched(method: Any, kind: int) -> Any:
        def call(self: Any, chunk: Chunk) -> Any:
            seen.append((kind, chunk.index))
            return method(self, chunk)

        return call

    for (owner, name, kind), method in zip(_METHODS, originals, strict=True):
        setattr(owner, name, watched(method, kind))
    try:
        yield seen
    finally:
        for (owner, name, _), method in zip(_METHODS, originals, strict=True):
            setattr(owner, name, method)


def simulated_events(plan: Plan, trace: StepTrace, hardware: HardwareProfile) -> list[tuple[int, int]]:
    """The same as the simulator has it, for one batch."""
    setting = setting_of(plan, plan.world_size, hardware.device_kind)
    times = SimulatedCost(trace, hardware, setting).times(MemoryModel(packed_step_of(plan, trace), setting))
    schedule = plan.schedule()
    events = times.events(placement_of(plan), schedule, schedule.simulate(plan.block_count), updated=True)
    pairs = zip(events.kinds, events.chunks, strict=True)
    return [(kind, chunk) for kind, chunk in pairs if kind in (LOAD, OPEN, SEND)]
