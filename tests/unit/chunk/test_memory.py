"""Memory knows the work that uses it, which is all the order of work on lanes, and counts itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elixir.chunk.lanes import ThreadLane
from elixir.chunk.memory import Memory, order


@pytest.fixture
def lanes() -> Iterator[tuple[ThreadLane, ThreadLane]]:
    both = ThreadLane("first"), ThreadLane("second")
    yield both
    for lane in both:
        lane.close()


def nothing() -> None:
    pass


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
