"""Races that streams, events and waits leave open: accesses to the same memory that nothing puts in an order.

The pretended device runs everything in the order of issue, so numbers never show a missing wait. But it writes down
what was issued where, and a wait that is missing is missing in there: each stream and each thread of the host has a
vector clock (Lamport 1978; Mattern 1988), events and waits pass clocks on, and two accesses to the same bytes, one of
them a write, must be ordered by them. Freed device memory counts as written to by the stream that it was made on, since
the caching allocator hands it out there at once; allocated memory as well, since its last owner's work may still be
running.
"""

from __future__ import annotations

import itertools
import queue
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.chunk import lanes
from tests.cuda_emulator import install

Clock = dict[str, int]
_numbers = itertools.count(1)


@dataclass
class Access:
    """One access: who touched which bytes when."""

    start: int
    end: int
    actor: str
    time: int
    writes: bool
    what: str


@dataclass
class Races:
    """Fills itself as the log is read."""

    found: list[str] = field(default_factory=list)
    clocks: dict[str, Clock] = field(default_factory=dict)
    passed: dict[tuple[str, int], Clock] = field(default_factory=dict)  # by event, or by what threads wait for
    touched: list[Access] = field(default_factory=list)
    known_to: dict[int, set[str]] = field(default_factory=dict)  # streams that a block was recorded on, by its address
    where: dict[int, str] = field(default_factory=dict)

    def read(self, entries: list[tuple[Any, ...]]) -> None:
        """Goes through a log."""
        workers = {entry[2] for entry in entries if entry[0] == "worker"}
        for kind, name, thread, stream, event, reads, writes in entries:
            host = f"thread {thread}" if thread in workers else "host"
            here, device = self._clock(host), f"stream {stream}"
            if kind == "where":
                self.where[thread] = name
            elif kind == "operator":
                self._join(self._clock(device), here)
                self._touch(device, reads, writes, f"{name} {self.where.get(thread, '')}")
            elif kind == "host":
                self._touch(host, reads, writes, f"{name} {self.where.get(thread, '')}")
            elif kind == "record":
                self._tick(device)
                self.passed["event", event] = self._joined(self._clock(device), here)
            elif kind == "block":
                self._join(self._clock(device), self.passed["event", event])
            elif kind == "synchronize":
                self._join(here, self.passed.get(("event", event), {}))
            elif kind == "synchronize stream":
                self._join(here, self._clock(device))
            elif kind == "synchronize device":
                for actor in [actor for actor in self.clocks if actor.startswith("stream")]:
                    self._join(here, self._clock(actor))
            elif kind == "release":
                self._tick(host)
                self._join(self.passed.setdefault(("signal", event), {}), here)
            elif kind == "acquire":
                self._join(here, self.passed.get(("signal", event), {}))
            elif kind in ("allocate", "pin"):
                self._forget(*writes[0])
                if kind == "allocate":
                    self._touch(device, [], writes, "allocated")
            elif kind == "record stream":
                self.known_to.setdefault(writes[0][0], set()).add(device)
            elif kind == "free":
                self._join(self._clock(device), here)
                # The allocator gives it to nobody before the streams that were recorded have come as far as they are.
                given = {"allocator": 0} | self._clock(device)
                for other in self.known_to.pop(writes[0][0], set()):
                    self._join(given, self._clock(other))
                self.clocks["allocator"] = given
                self._touch("allocator", [], writes, f"freed {self.where.get(thread, '')}")
                self._forget(*writes[0])
            elif kind == "unpin":
                self._touch(host, [], writes, f"unpinned {self.where.get(thread, '')}")
                self._forget(*writes[0])

    def _clock(self, actor: str) -> Clock:
        return self.clocks.setdefault(actor, {actor: 1})

    def _tick(self, actor: str) -> int:
        clock = self._clock(actor)
        clock[actor] += 1
        return clock[actor]

    @staticmethod
    def _join(clock: Clock, other: Clock) -> None:
        for actor, time in other.items():
            clock[actor] = max(clock.get(actor, 0), time)

    def _joined(self, clock: Clock, other: Clock) -> Clock:
        both = dict(clock)
        self._join(both, other)
        return both

    def _forget(self, start: int, end: int) -> None:
        self.touched = [access for access in self.touched if access.end <= start or access.start >= end]

    def _touch(self, actor: str, reads: Any, writes: Any, what: str) -> None:
        time, clock = self._tick(actor), self._clock(actor)
        for ranges, writing in ((reads, False), (writes, True)):
            for start, end in ranges:
                kept = []
                for access in self.touched:
                    apart = access.end <= start or access.start >= end
                    if apart or not (writing or access.writes):
                        kept.append(access)
                        continue
                    before = access.time <= clock.get(access.actor, 0)
                    if not before and (access.what, access.time) != (what, time):
                        self.found.append(
                            f"{min(end, access.end) - max(start, access.start)} bytes: {access.what} ({access.actor}) "
                            "and "
                            f"{what} ({actor}), in no order"
                        )
                    # What comes after this one comes after whatever this one comes after.
                    if not (before and writing and start <= access.start and access.end <= end):
                        kept.append(access)
                self.touched = [*kept, Access(start, end, actor, time, writing, what)]


class Signal(threading.Event):
    """An event of the host's threads that passes their clocks on."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_numbers)

    def set(self) -> None:
        install().note("release", self.number, [], [], "")
        super().set()

    def is_set(self) -> bool:
        known = super().is_set()
        if known:
            install().note("acquire", self.number, [], [], "")
        return known

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        install().note("acquire", self.number, [], [], "")
        return found


class _Queue:
    """A queue between the host's threads that passes their clocks on; who takes from it is a worker."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._number = next(_numbers)
        self._mode: HostAccesses | None = None

    def put(self, item: Any) -> None:
        install().note("release", self._number, [], [], "")
        self._queue.put(item)

    def get(self) -> Any:
        if self._mode is None:
            self._mode = HostAccesses()
            self._mode.__enter__()  # for as long as the thread lives
        item = self._queue.get()
        install().note("worker", 0, [], [], "")
        install().note("acquire", self._number, [], [], "")
        return item


class HostAccesses(TorchDispatchMode):
    """Writes down what the host's operators do to pinned memory, and where in the code an operator is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = install()
        stack = [
            frame
            for frame in traceback.extract_stack(limit=12)
            if "/elixir/" in frame.filename and frame.name != "<lambda>"
        ]
        at = f"at {stack[-1].filename.rsplit('/elixir/')[-1]}:{stack[-1].lineno} {stack[-1].name}" if stack else ""
        device.note("where", 0, [], [], at)
        result = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        reads, writes, names = [], [], func._schema.arguments
        on_device = False
        for index, value in enumerate(given):
            argument = (
                names[index]
                if index < len(args)
                else next(a for a in names if a.name == list(kwargs)[index - len(args)])
            )
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(tensor, torch.Tensor):
                    continue
                on_device = on_device or tensor.is_cuda
                if tensor.device.type == "cpu" and tensor.numel() and device.is_pinned(tensor.data_ptr()):
                    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                    start = tensor.data_ptr()
                    (writes if written else reads).append((start, start + (last + 1) * tensor.element_size()))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not on_device and not views and (reads or writes):
            device.note("host", 0, reads, writes, str(func))
        return result


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Races]:
    """Checks what runs inside, with lanes made inside, when it is over."""
    device, races = install(), Races()
    monkeypatch.setattr(lanes, "threading", _Threading())
    monkeypatch.setattr(lanes, "queue", _Queues())
    device.start_log()
    try:
        with HostAccesses():
            yield races
    finally:
        races.read(device.stop_log())


class _Thread(threading.Thread):
    """Joining it comes after all it did."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._number = next(_numbers)

    def run(self) -> None:
        super().run()
        install().note("release", self._number, [], [], "")

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        install().note("acquire", self._number, [], [], "")


class _Threading:
    Event, Thread = Signal, _Thread

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Queues:
    SimpleQueue = _Queue

    def __getattr__(self, name: str) -> Any:
        return getattr(queue, name)
