"""Updates that fail, or are interrupted, while a snapshot is taken: training goes on, and the save fails."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest
import torch

from elixir.checkpoint.snapshot import Snapshot, aligned
from elixir.errors import CheckpointError
from tests.common import inside
from tests.unit.checkpoint.test_snapshot import CPU, SPAN, Chunk, Flat, Sink, _small_spans, pool_of  # noqa: F401

needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signal interrupts the main thread")


class Waiting(Flat):
    """A live tensor whose reader says that it has begun, and goes on when it may."""

    def __init__(self, tensor: torch.Tensor, error: Exception | None = None) -> None:
        super().__init__(tensor)
        self.begun, self.go, self.error = threading.Event(), threading.Event(), error

    def values(self, first: int, stop: int) -> torch.Tensor:
        self.begun.set()
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        return super().values(first, stop)


def release_until_time_is_up(snapshot: Snapshot) -> None:
    """Updates chunk 0 on the main thread, whose wait for others is interrupted."""
    over = threading.Event()

    def time_is_up(*_: object) -> None:
        over.set()
        raise TimeoutError("time is up")

    def interrupt() -> None:
        while 0 not in inside.updates_waiting(snapshot):
            time.sleep(1e-3)
        while not over.is_set():  # a signal wakes a thread that waits already; one about to wait handles it later
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            over.wait(1)

    before = signal.signal(signal.SIGALRM, time_is_up)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        snapshot.release(0)
        assert over.wait(20)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reading", [True, False])
def test_an_update_that_cannot_copy_goes_on_and_the_writer_ends(reading: bool) -> None:
    """Either the states cannot be read, or they were written to meanwhile. The writer waits for the copy."""
    copying, go = threading.Event(), threading.Event()

    class Unreadable(Flat):
        def values(self, first: int, stop: int) -> torch.Tensor:
            copying.set()
            assert go.wait(20)
            if reading:
                raise RuntimeError("unreadable")
            return super().values(first, stop)

    chunks, pool = [Chunk(0, 10), Chunk(1, 10)], pool_of(1 << 12)
    snapshot = Snapshot(chunks, pool, CPU)
    chunks[0].read = lambda: {"a/0": Unreadable(torch.ones(10))}  # type: ignore[method-assign]

    def check() -> None:
        raise RuntimeError("unreadable")

    if not reading:
        chunks[0].check = check  # type: ignore[method-assign]
    update = threading.Thread(target=snapshot.release, args=(0,))
    update.start()
    assert copying.wait(20)
    snapshot.release(1)  # its copy is given up, too
    found: list[BaseException] = []

    def writes() -> None:
        try:
            snapshot.write(Sink(random.Random(0), 0).write, lambda: None)
        except CheckpointError as error:
            found.append(error)

    writer = threading.Thread(target=writes)
    writer.start()
    time.sleep(0.02)
    go.set()
    for thread in (update, writer):
        thread.join(20)
        assert not thread.is_alive()
    assert "unreadable" in str(found)
    snapshot.end()
    assert not inside.taken_bytes(pool)
    snapshot.release(0)
    snapshot.wait_for_live()


def test_an_interrupt_of_an_update_ends_it_and_the_save() -> None:
    class Interrupted(Flat):
        def values(self, first: int, stop: int) -> torch.Tensor:
            raise KeyboardInterrupt

    chunk = Chunk(0, 10)
    chunk.read = lambda: {"a/0": Interrupted(torch.ones(10))}  # type: ignore[method-assign]
    snapshot = Snapshot([chunk], pool_of(1 << 12), CPU)
    with pytest.raises(KeyboardInterrupt):
        snapshot.release(0)
    with pytest.raises(CheckpointError):
        snapshot.write(Sink(random.Random(0), 0).write, lambda: None)


@needs_signals
def test_an_interrupt_of_an_update_that_waits_for_the_writer_ends_both() -> None:
    begun, goes_on, written = threading.Event(), threading.Event(), list[int]()
    snapshot, found = Snapshot([Chunk(0, 3 * SPAN)], pool_of(1 << 16), CPU), list[Exception]()

    def write_span(key: str, number: int, data: memoryview) -> None:
        written.append(number)
        begun.set()
        goes_on.wait(20)

    def write() -> None:
        try:
            snapshot.write(write_span, lambda: None)
        except CheckpointError as error:
            found.append(error)
        snapshot.end()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert begun.wait(20)
    release_until_time_is_up(snapshot)  # a save that failed is no error of the step
    goes_on.set()
    writer.join(20)
    assert not writer.is_alive()
    assert "time is up" in str(found)
    assert written == [0], "nothing is written for a save that is given up"


@needs_signals
def test_an_interrupt_of_an_update_that_waits_for_another_leaves_that_the_memory_for_its_copy() -> None:
    live, chunk, pool = Waiting(torch.ones(SPAN)), Chunk(0, SPAN), pool_of(1 << 12)
    chunk.read = lambda: {"a/0": live}  # type: ignore[method-assign]
    snapshot = Snapshot([chunk], pool, CPU)
    first = threading.Thread(target=snapshot.release, args=(0,))
    first.start()
    assert live.begun.wait(20)
    release_until_time_is_up(snapshot)
    assert inside.taken_bytes(pool) == aligned(live.nbytes)
    live.go.set()
    first.join(20)
    assert snapshot.copied_bytes == aligned(live.nbytes)
    with pytest.raises(CheckpointError, match="time is up"):
        snapshot.write(Sink(random.Random(0), 0).write, lambda: None)
    snapshot.end()
    assert not inside.taken_bytes(pool)


def test_a_copy_is_given_up_while_it_is_written() -> None:
    live, chunks, pool = (
        Waiting(torch.ones(10), RuntimeError("unreadable")),
        [Chunk(0, 10), Chunk(1, 10)],
        pool_of(1 << 12),
    )
    chunks[1].read = lambda: {"a/1": live}  # type: ignore[method-assign]
    snapshot, written = Snapshot(chunks, pool, CPU), list[str]()
    snapshot.release(0)
    update = threading.Thread(target=snapshot.release, args=(1,))
    update.start()
    assert live.begun.wait(20)

    def write(key: str, number: int, data: memoryview) -> None:
        written.append(key)
        live.go.set()
        update.join(20)

    with pytest.raises(CheckpointError, match="unreadable"):
        snapshot.write(write, lambda: None)
    assert written[0] == "a/0"
    assert not inside.taken_bytes(pool)
    snapshot.end()
