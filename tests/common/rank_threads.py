"""Ranks as threads of this process, over real gloo: tests of several ranks for milliseconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld, WorldData

T = TypeVar("T")
TIMEOUT_S = 20.0


class _Worlds(ThreadLocalWorld):  # type: ignore[misc]
    """The process groups that torch knows: those of the rank whose thread asks, or started the thread that asks."""

    def _get_world(self) -> WorldData:
        thread = threading.current_thread()
        if not hasattr(thread, "world"):
            thread.world = _new_world()  # type: ignore[attr-defined]
        found: WorldData = thread.world  # type: ignore[attr-defined]
        return found

    @property
    def comms(self) -> list[Any]:
        """In torch 2.11 a group that ends asks for them, but its worlds of threads have none."""
        found: list[Any] = vars(self._get_world()).setdefault("comms", [])
        return found


def _new_world() -> WorldData:
    """A world without groups, whichever fields this release of torch gives it."""
    empty = {"default_pg": None, "group_count": 0, "comms": []}
    world: WorldData = WorldData(**{field.name: empty.get(field.name, {}) for field in fields(WorldData)})
    return world


@contextlib.contextmanager
def _threads_have_worlds() -> Iterator[None]:
    """Gives each thread process groups, which the threads that it starts share."""
    before, start = distributed_c10d._world, threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if hasattr(threading.current_thread(), "world"):
            thread.world = threading.current_thread().world  # type: ignore[attr-defined]
        start(thread)

    distributed_c10d._world = _Worlds()  # type: ignore[assignment]
    threading.Thread.start = started  # type: ignore[method-assign]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threading.Thread.start = start  # type: ignore[method-assign]
        distributed_c10d._world = before


def on_ranks(size: int, work: Callable[[int], T], *, timeout_s: float = TIMEOUT_S) -> list[T | Exception]:
    """Runs `work` on `size` ranks with a default group; lists the results or errors by rank."""
    found: list[T | Exception] = [AssertionError("did not end")] * size
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            given = timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=given)
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    with _threads_have_worlds():
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * timeout_s)
    return found


def results(size: int, work: Callable[[int], T], *, timeout_s: float = TIMEOUT_S) -> list[T]:
    """Runs `work` on `size` ranks; lists the results by rank, or raises the first error."""
    found: list[T] = []
    for each in on_ranks(size, work, timeout_s=timeout_s):
        if isinstance(each, Exception):
            raise each
        found.append(each)
    return found
