"""Overlap in an optimizer step: the host's Adam of one chunk, and the transfers of its neighbours."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elixir.chunk.lanes import Lane, ThreadLane
from elixir.chunk.memory import Memory, Ticket
from elixir.plan.plan import Plan
from tests.common import inside
from tests.common.parity import Pair, case, make_plan

WAIT_S = 20.0
"""Longer than a step of a tiny model ever takes; only a test that fails waits for it."""


def states_on_host(plan: Plan, streamed: int = 0) -> Plan:
    """The same packing, all weights resident but those of the chunks used first, all states on the host.

    What it predicts is no longer meant.
    """
    first = list(dict.fromkeys(index for use in plan.order for index in use.chunks))[:streamed]
    chunks = [
        dataclasses.replace(chunk, resident=True, weight_home="device", state_home="host")
        if index not in first
        else dataclasses.replace(chunk, resident=False, weight_home="host", state_home="host")
        for index, chunk in enumerate(plan.chunks)
    ]
    return dataclasses.replace(plan, chunks=tuple(chunks))


@contextmanager
def held(lane: Lane) -> Iterator[Ticket]:
    """The lane does nothing meanwhile; the ticket is done once it has been let go, or somebody has waited too long."""
    gate, host, memory = threading.Event(), ThreadLane("gate"), Memory()
    # A stream is given work at once, in this thread, unless the work builds on what the host still does.
    host.submit(lambda: gate.wait(WAIT_S), writes=[memory])
    ticket = lane.submit(lambda: None, reads=[memory])
    try:
        yield ticket
    finally:
        gate.set()
        host.close()


def over(ticket: Ticket) -> bool:
    """Whether the work gets done while others are held."""
    done = threading.Event()
    threading.Thread(target=lambda: (ticket.synchronize(), done.set()), daemon=True).start()
    return done.wait(WAIT_S / 2)


def test_the_host_steps_the_next_chunks_while_new_weights_are_on_their_way() -> None:
    it = case("opt", layers=1)
    with Pair(it, states_on_host(make_plan(it, "resident"))) as pair:
        pair.train(1)
        pair.backward()
        lanes = inside.lanes(pair.module)
        with held(lanes.refresh):
            pair.step()
            assert over(lanes.host_adam.submit(lambda: None)), "a step waited for new weights of another chunk"
            updates = [chunk.at_home.writer for chunk in inside.chunks(pair.module)]
            assert len(updates) > 2
            assert not any(ticket is None or ticket.done() for ticket in updates)
        pair.train(2)
