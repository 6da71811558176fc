"""Host buffers take turns, wait for the work on them, and are counted."""

from __future__ import annotations

import threading

import pytest
import torch

from elixir.chunk.buffers import Arena
from elixir.chunk.host_buffers import BufferKind, HostBuffers, SizeClass
from elixir.chunk.lanes import ThreadLane
from elixir.errors import StateError

CPU = torch.device("cpu")
TWO_SIZES = BufferKind("snapshot", "checkpoint", (SizeClass(64, 2), SizeClass(256, 1)))


def made(kind: BufferKind) -> tuple[HostBuffers, Arena]:
    arena = Arena(CPU)
    buffers = HostBuffers(arena)
    buffers.add(kind)
    return buffers, arena


def test_buffers_of_a_class_take_turns_and_the_smallest_class_with_room_serves() -> None:
    buffers, arena = made(TWO_SIZES)
    assert arena.parts("host") == {"checkpoint": TWO_SIZES.nbytes} == {"checkpoint": 384}
    small = [buffers.take("snapshot", 48) for _ in range(3)]
    assert small[0] is small[2]
    assert small[0] is not small[1]
    large = buffers.take("snapshot", 65)
    assert large.memory.nbytes == 256
    assert large.view(8, torch.float32).shape == (8,)


def test_what_nothing_has_room_for_grows_once_the_work_on_it_is_over() -> None:
    buffers, arena = made(TWO_SIZES)
    lane, gate = ThreadLane("writer"), threading.Event()
    buffers.take("snapshot", 256).uses.written_by(lane.submit(gate.wait))
    grown = threading.Event()

    def take() -> None:
        buffers.take("snapshot", 1000)
        grown.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not grown.wait(0.1)
    gate.set()
    thread.join()
    assert arena.parts("host") == {"checkpoint": 128 + 1000}
    lane.close()


def test_kinds_come_and_go_and_follow_another_arena() -> None:
    buffers, before = made(TWO_SIZES)
    with pytest.raises(StateError, match="'snapshot'"):
        buffers.add(TWO_SIZES)
    later = Arena(CPU)
    buffers.count_in(later)
    buffers.add(BufferKind("undo", "undo", (SizeClass(32, 1),), at_once=False))
    assert later.parts("host") == {"checkpoint": 384}
    buffers.take("undo", 16)
    assert later.parts("host") == {"checkpoint": 384, "undo": 32}
    buffers.drop("snapshot")
    assert later.parts("host") == {"undo": 32}
    assert before.peak_bytes["host"] == 384


def test_an_error_of_work_on_a_buffer_is_told_once() -> None:
    buffers, _ = made(TWO_SIZES)
    lane = ThreadLane("writer")

    def fail() -> None:
        raise OSError("disk full")

    buffers.take("snapshot", 1).uses.written_by(lane.submit(fail))
    assert [str(error) for error in buffers.failures()] == ["disk full"]
    assert buffers.failures() == []
    lane.close()
