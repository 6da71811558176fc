"""Memory knows the work that uses it, which is all the order of work on lanes, and counts itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from elixir.chunk.lanes import ThreadLane
from elixir.chunk.memory import Arena, Memory, order, written


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


def test_work_waits_for_each_other_work_once(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    one, other = Memory(), Memory()
    both = lanes[0].submit(nothing, writes=[one, other])
    assert order([one, other], [one, other]) == ([both], [])
    assert written(one, other, Memory()) == [both]


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


def test_work_that_fails_with_other_work_ends_after_all_that_it_follows(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    """The next user of the same memory waits for this work alone."""
    broken, used, gate = Memory(), Memory(), threading.Event()
    third = ThreadLane("third")
    lanes[0].submit(fail, writes=[broken])
    reading = lanes[1].submit(gate.wait, reads=[used])
    failing = third.submit(nothing, reads=[broken], writes=[used])
    threading.Timer(0.05, gate.set).start()
    failing.join()
    assert str(failing.error) == "disk full"
    assert reading.done()
    third.close()


@pytest.mark.parametrize("how", ["wait", "synchronize"])
@pytest.mark.parametrize("taking", [False, True])
def test_who_reads_waits_for_the_writer_and_who_takes_for_all(
    lanes: tuple[ThreadLane, ThreadLane], how: str, taking: bool
) -> None:
    memory, gate = Memory(), threading.Event()
    lanes[0].submit(nothing, writes=[memory])
    reading = lanes[1].submit(gate.wait, reads=[memory])
    if taking:
        threading.Timer(0.05, gate.set).start()
    getattr(memory, how)(taking=taking)
    assert reading.done() == taking
    assert (memory.users == []) == taking, "what comes next does not wait for them again"
    gate.set()


def test_memory_that_is_settled_has_no_users_whether_or_not_they_have_failed(
    lanes: tuple[ThreadLane, ThreadLane],
) -> None:
    memory, gate = Memory(), threading.Event()
    lanes[0].submit(fail, writes=[memory])
    lanes[0].submit(nothing, reads=[memory])  # meets the same error
    early = lanes[1].submit(gate.wait, reads=[memory], despite_errors=True)
    threading.Timer(0.05, gate.set).start()
    memory.settle()
    assert early.done()
    assert memory.users == []


def test_a_part_has_its_own_writer_and_waits_for_users_of_the_bytes(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    whole = Memory(torch.zeros(8, dtype=torch.uint8))
    before, part = whole.part(0, 4), whole.part(4, 4)
    sent = lanes[0].submit(nothing, writes=[before])
    back = lanes[1].submit(nothing, reads=[before])
    assert order([part], []) == ([], []), "nobody has written it"
    assert order([], [part]) == ([], [sent, back]), "which had other bytes, or these"
    failing = lanes[1].submit(fail, writes=[part])
    whole.settle()
    assert str(failing.error) == "disk full"


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
