"""Memory knows the work that uses it, which is all the order of work on lanes, and counts itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from elixir.chunk.lanes import ThreadLane
from elixir.chunk.memory import Arena, Memory, order


@pytest.fixture
def lanes() -> Iterator[tuple[ThreadLane, ThreadLane]]:
    both = ThreadLane("first"), ThreadLane("second")
    yield both
    for lane in both:
        lane.close()


def nothing() -> None:
    pass


def fail() -> None:
    raise OSError("disk full")


def test_what_reads_follows_the_writer_and_what_writes_the_readers_too(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    first, second = lanes
    memory = Memory()
    assert order([memory], [memory]) == ([], [])
    filling = first.submit(nothing, writes=[memory])
    assert order([memory], []) == ([filling], [])
    assert order([], [memory]) == ([], [filling])
    early, late = (second.submit(nothing, reads=[memory]) for _ in range(2))
    same_lane = first.submit(nothing, reads=[memory])
    assert early not in order([], [memory])[1], "the lane works in order"
    assert order([], [memory]) == ([], [filling, late, same_lane])
    assert order([memory], [memory]) == ([filling], [late, same_lane])
    changed = second.submit(nothing, reads=[memory], writes=[memory])
    assert memory.users == [changed]


@pytest.mark.parametrize("how", ["reads", "writes", "despite errors"])
def test_what_reads_fails_with_the_writer_and_what_writes_does_not(
    lanes: tuple[ThreadLane, ThreadLane], how: str
) -> None:
    memory, ran = Memory(), list[int]()
    lanes[0].submit(fail, writes=[memory])
    work = lambda: ran.append(1)  # noqa: E731
    use = {
        "reads": lambda: lanes[1].submit(work, reads=[memory], writes=[memory]),
        "writes": lambda: lanes[1].submit(work, writes=[memory]),
        "despite errors": lambda: lanes[1].submit(work, reads=[memory], despite_errors=True),
    }[how]
    ticket = use()
    ticket.join()
    assert (str(ticket.error), ran) == (("disk full", []) if how == "reads" else ("None", [1]))


@pytest.mark.parametrize("count", [lambda memory: memory.free(), lambda memory: memory.count_by(Arena(CPU).count)])
def test_memory_is_counted_as_long_as_it_is_there(count: Callable[[Memory], None]) -> None:
    arena = Arena(CPU)
    memory = arena.make(40, torch.uint8, "host", "weights")
    assert arena.parts("host") == {"weights": 40}
    assert memory.view(4, torch.float32).shape == (4,)
    count(memory)
    memory.free()
    assert (memory.tensor.numel(), memory.users) == (0, [])
    assert arena.peak_bytes["host"] == 40


CPU = torch.device("cpu")
