"""Host buffers take turns, wait for the work on them, and are counted; and the lane that moves tensors into them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from elixir.chunk.host_buffers import SWAPPED, BufferKind, HostBuffers, HostMover, SentTensor, summands_kind
from elixir.chunk.lanes import Lane, Lanes, ThreadLane, make_lanes
from elixir.chunk.memory import Arena, Memory
from elixir.errors import StateError
from tests.common.samples import make_plan

CPU = torch.device("cpu")
SNAPSHOT = BufferKind("snapshot", "checkpoint", 64, count=2)


def made(kind: BufferKind) -> tuple[HostBuffers, Arena]:
    arena = Arena(CPU)
    buffers = HostBuffers(arena)
    buffers.add(kind)
    return buffers, arena


def test_kinds_come_and_go_and_follow_another_arena() -> None:
    buffers, before = made(SNAPSHOT)
    with pytest.raises(StateError, match="'snapshot'"):
        buffers.add(SNAPSHOT)
    later = Arena(CPU)
    buffers.count_in(later)
    buffers.add(BufferKind("new_states", "new_states", 32, count=1, at_once=False))
    assert later.parts("host") == {"checkpoint": 128}
    buffers.take("new_states", 16)
    assert later.parts("host") == {"checkpoint": 128, "new_states": 32}
    buffers.drop("snapshot")
    assert later.parts("host") == {"new_states": 32}
    assert before.peak_bytes["host"] == 128


def test_gradients_that_a_device_adds_up_have_their_buffers_before_the_first_step() -> None:
    unused = make_plan(4)
    plan = replace(unused, chunks=tuple(replace(chunk, reduce_order=0) for chunk in unused.chunks))
    kinds = {
        (device, backwards): summands_kind(plan, device, backwards=backwards)
        for device in ("cpu", "cuda")
        for backwards in (1, 2)
    }
    assert [case for case, kind in kinds.items() if kind.at_once] == [("cuda", 2)]
    assert {(kind.buffer_bytes, kind.count) for kind in kinds.values()} == {(2 * 2**24, 2)}
    assert summands_kind(plan, "cuda", backwards=2, wide=True).buffer_bytes == 4 * 2**24
    assert summands_kind(unused, "cuda", backwards=2).nbytes == 0


LENT = BufferKind(SWAPPED, "swapped_activations", 1024, 1, at_once=False)


def lend(buffers: HostBuffers, sizes: Sequence[int]) -> list[Memory]:
    return [buffers.lend(SWAPPED, nbytes) for nbytes in sizes]


def test_parts_of_any_sizes_take_no_more_than_the_buffer_as_long_as_it_has_room() -> None:
    buffers, arena = made(LENT)
    assert arena.parts("host") == {}
    for sizes in ([16] * 4, [256] * 4, [64, 512, 32, 128], [1024], [4, 64, 4, 60]):
        parts = lend(buffers, sizes)
        for value, part in enumerate(parts):
            part.tensor.fill_(value)
        assert [part.tensor.unique().tolist() for part in parts] == [[value] for value in range(len(parts))]
        assert parts[-1].view(1, torch.float32).shape == (1,)
        for part in reversed(parts):
            buffers.give_back(SWAPPED, part)
    assert arena.peak_bytes["host"] == LENT.nbytes == 1024


def test_a_part_fills_the_gap_of_one_that_was_returned() -> None:
    buffers, arena = made(LENT)
    first, middle, last = lend(buffers, [256, 512, 256])
    buffers.give_back(SWAPPED, middle)
    (again,) = lend(buffers, [512])
    assert again.tensor.data_ptr() == middle.tensor.data_ptr()
    lane, gate = ThreadLane("work"), threading.Event()
    read = lane.submit(gate.wait, reads=[middle])
    assert again.users == [read], "its writer waits for what still reads the gap"
    gate.set()
    lane.close()
    assert arena.parts("host") == {"swapped_activations": 1024}
    assert first.tensor.data_ptr() != last.tensor.data_ptr()


def test_what_has_no_room_lies_next_to_the_buffer_until_that_grows(caplog: pytest.LogCaptureFixture) -> None:
    """Batches that are longer than the traced one do so."""
    buffers, arena = made(LENT)
    for total in (1024, 2000, 1600, 3000):
        parts = lend(buffers, [total // 4] * 4)
        assert len({part.tensor.data_ptr() for part in parts}) == 4
        assert arena.parts("host")["swapped_activations"] <= max(2000, total) + 2 * 500
        for part in parts:
            buffers.give_back(SWAPPED, part)
    last = lend(buffers, [8])
    assert 3000 <= arena.parts("host")["swapped_activations"] <= 3100
    assert [record.message for record in caplog.records] == [
        "swapped activations take 1.98 KiB of host memory, for which the plan has 1.00 KiB: a batch is larger than the "
        "one that was traced; plan for the largest (inp=)"
    ]
    buffers.drop(SWAPPED)
    assert arena.parts("host") == {}
    buffers.give_back(SWAPPED, last[0])  # of a plan that has gone


# --- the mover ------------------------------------------------------------------------------------------------------


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
        assert moving.lanes.counts.device_to_host_bytes == times * VALUES.nbytes
        assert moving.lanes.counts.host_to_device_bytes == 2 * times * VALUES.nbytes
        del sent
    assert len(moving.buffers.of(SWAPPED)) == 1, "the next tensor takes the same memory"


def test_memory_is_free_once_the_copy_to_the_host_is_over(moving: Moving) -> None:
    held: list[SentTensor] = []
    assert waits_for(moving.lanes.offload, lambda: held.append(moving.sent()), lambda: held[0].arrived())
    held.clear()
    assert waits_for(moving.lanes.offload, lambda: held.append(moving.sent()), lambda: moving.buffers.drop(SWAPPED)), (
        "the buffer is still written to"
    )
