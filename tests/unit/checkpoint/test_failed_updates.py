"""Updates that fail, or are interrupted, while a snapshot is taken: training goes on, and the save fails."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from elixir.checkpoint.snapshot import Snapshot
from elixir.errors import CheckpointError
from tests.common import inside
from tests.unit.checkpoint.test_snapshot import CPU, SPAN, Chunk, Flat, Sink, _small_spans, pool_of  # noqa: F401


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
