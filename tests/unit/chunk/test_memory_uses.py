"""Work that uses a piece of memory comes after what has used it before."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elixir.chunk.lanes import MemoryUses, ThreadLane


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


def test_what_reads_waits_for_the_writer_and_what_writes_for_the_readers_too(
    lanes: tuple[ThreadLane, ThreadLane],
) -> None:
    uses = MemoryUses()
    assert uses.to_read() == uses.to_write() == []
    written = uses.written_by(lanes[0].submit(nothing))
    first, fetched = (uses.read_by("fetch", lanes[1].submit(nothing, after=uses.to_read())) for _ in range(2))
    assert uses.to_read() == [written]
    assert set(uses.to_write()) == {written, fetched}
    assert first is not fetched
    early = uses.read_by("early", lanes[0].submit(nothing))
    assert set(uses.to_write()) == {written, fetched, early}


def test_a_reader_counts_past_a_write_since_memory_may_have_changed_places(
    lanes: tuple[ThreadLane, ThreadLane],
) -> None:
    uses = MemoryUses()
    fetched = uses.read_by("fetch", lanes[0].submit(nothing))
    written = uses.written_by(lanes[1].submit(nothing))
    assert set(uses.to_write()) == {fetched, written}


def test_an_error_is_given_once_and_what_failed_is_waited_for_no_more(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    uses, gate = MemoryUses(), threading.Event()
    held = lanes[1].submit(gate.wait)
    failed = uses.written_by(lanes[0].submit(fail))
    uses.read_by("fetch", lanes[0].submit(nothing, after=[failed]))  # meets the same error
    early = uses.read_by("early", held)
    gate.set()
    assert [str(error) for error in uses.failures()] == ["disk full"]
    assert early.done()
    assert uses.to_write() == [early]
    assert uses.failures() == []


def test_whether_the_writer_has_failed_is_known_without_waiting(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    uses, gate = MemoryUses(), threading.Event()
    assert not uses.has_failed
    uses.written_by(lanes[0].submit(lambda: (gate.wait(), fail())))
    assert not uses.has_failed
    gate.set()
    lanes[0].submit(nothing).synchronize()
    assert uses.has_failed
