"""Activations on their way to the host and back: who waits for which copy, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from elixir.chunk.arena import Arena
from elixir.chunk.host_buffers import SWAPPED, BufferKind, HostBuffers
from elixir.chunk.host_mover import HostMover, SentTensor
from elixir.chunk.lanes import Lane, Lanes, make_lanes

CPU = torch.device("cpu")
VALUES = torch.arange(8.0)


@dataclass
class Moving:
    lanes: Lanes
    buffers: HostBuffers
    mover: HostMover

    def sent(self) -> SentTensor:
        return self.mover.send(VALUES.clone())


@pytest.fixture
def moving() -> Iterator[Moving]:
    lanes, buffers = make_lanes(CPU), HostBuffers(Arena(CPU))
    buffers.add(BufferKind(SWAPPED, "swapped_activations", VALUES.nbytes, 1, at_once=False))
    yield Moving(lanes, buffers, HostMover(lanes, buffers))
    lanes.close()


def waits_for(lane: Lane, begin: Callable[[], object], work: Callable[[], object]) -> bool:
    """Whether `work` ends only after what `begin` submits to a lane, which is held up meanwhile."""
    gate, ended = threading.Event(), threading.Event()
    lane.submit(gate.wait)
    begin()
    thread = threading.Thread(target=lambda: (work(), ended.set()))
    thread.start()
    early = ended.wait(0.05)
    gate.set()
    thread.join()
    assert ended.is_set()
    return not early


def test_a_tensor_comes_back_as_it_left_and_its_bytes_are_counted(moving: Moving) -> None:
    for times in (1, 2):
        sent = moving.sent()
        sent.arrived()
        first = sent.tensor()
        sent.fetch()  # it is here already
        assert sent.tensor() is first
        assert torch.equal(first, VALUES)
        sent.forget()
        sent.fetch()
        again = sent.tensor()
        assert again is not first
        assert torch.equal(again, VALUES)
        assert moving.mover.sent_bytes == times * VALUES.nbytes
        assert moving.mover.returned_bytes == 2 * times * VALUES.nbytes
        del sent
    assert len(moving.buffers.of(SWAPPED)) == 1, "the next tensor takes the same memory"


def test_memory_is_free_once_the_copy_to_the_host_is_over(moving: Moving) -> None:
    held: list[SentTensor] = []
    assert waits_for(moving.lanes.offload, lambda: held.append(moving.sent()), lambda: held[0].arrived())
    held.clear()
    assert waits_for(moving.lanes.offload, lambda: held.append(moving.sent()), lambda: moving.buffers.drop(SWAPPED)), (
        "the buffer is still written to"
    )


@pytest.mark.parametrize("how", ["used", "forgotten", "let go of", "buffer dropped"])
def test_a_copy_back_is_waited_for_however_the_tensor_ends(moving: Moving, how: str) -> None:
    """Otherwise compute would read half of it, or get memory that the copy still writes to."""
    held = [moving.sent()]
    held[0].arrived()
    ends: dict[str, Callable[[], object]] = {
        "used": lambda: held[0].tensor(),
        "forgotten": lambda: held[0].forget(),
        "let go of": held.clear,
        "buffer dropped": lambda: moving.buffers.drop(SWAPPED),
    }
    assert waits_for(moving.lanes.fetch, lambda: held[0].fetch(), ends[how])
