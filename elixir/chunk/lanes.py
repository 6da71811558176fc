"""Lanes: where work runs beside compute, one lane per resource.

A lane takes work in order and runs it beside the caller. `submit` gives a `Ticket`; `Ticket.wait` makes the *compute*
that follows wait, `Ticket.synchronize` makes the *calling thread* wait. On CUDA a lane is a stream and a ticket an
event, so neither compute nor the host stops where it need not. On the CPU a lane is a worker thread, with an optional
emulated link (so many bytes per second) and random delays, so that overlap can be measured and races shaken out
without a GPU.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

Work = Callable[[], object]


class Ticket(Protocol):
    """Work that was submitted."""

    def wait(self) -> None:
        """What compute does from here on comes after the work. Raises what the work raised."""

    def synchronize(self) -> None:
        """Block this thread until the work is done. Raises what the work raised."""

    def done(self) -> bool:
        """Whether the work is done."""


class Lane(Protocol):
    """One resource that works beside compute."""

    waited_s: float
    """How long compute stood still for this lane; on CUDA, where nobody stands still, always 0."""

    def submit(self, work: Work, *, after: Sequence[Ticket] = (), nbytes: int = 0) -> Ticket:
        """Run `work` behind all earlier work of this lane, behind `after`, and behind compute submitted so far.

        Args:
            work: issues copies or collectives; must not touch what compute may still change.
            after: tickets of other lanes that the work builds on.
            nbytes: what it moves; an emulated link takes its time for so many bytes.
        """

    def close(self) -> None:
        """Finish what was submitted, then stop."""


@dataclass(frozen=True)
class Emulation:
    """What a CPU lane pretends.

    Attributes:
        bytes_per_s: speed of the link; None for as fast as memory.
        delay_s: work is held back for a random time up to this; for tests.
        seed: of the delays.
        blocking: whoever submits work waits for it, so that nothing overlaps; to see what overlap is worth.
    """

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    seed: int = 0
    blocking: bool = False


class _ThreadTicket:
    def __init__(self, lane: ThreadLane) -> None:
        self._lane = lane
        self._event = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def synchronize(self) -> None:
        if not self._event.is_set():
            started = time.perf_counter()
            self._event.wait()
            self._lane.waited_s += time.perf_counter() - started
        if self._error is not None:
            raise self._error

    wait = synchronize  # compute on the CPU is the calling thread


class ThreadLane:
    """A lane of the CPU backend: one worker thread.

    Args:
        name: of the thread.
        emulation: link speed and delays.
    """

    def __init__(self, name: str, emulation: Emulation | None = None) -> None:
        self._emulation = emulation or Emulation()
        self._random = random.Random(f"{self._emulation.seed} {name}")
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Ticket], int, _ThreadTicket] | None] = queue.SimpleQueue()
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"elixir {name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, *, after: Sequence[Ticket] = (), nbytes: int = 0) -> Ticket:
        """See `Lane.submit`; compute on the CPU is done with what it was given when this is called."""
        ticket = _ThreadTicket(self)
        self._queue.put((work, tuple(after), nbytes, ticket))
        if self._emulation.blocking:
            ticket.synchronize()
        return ticket

    def close(self) -> None:
        """Finish and join the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            if threading.current_thread() is not self._thread:  # a module may be let go of by its own last work
                self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, after, nbytes, ticket = item
            error: BaseException | None = None
            try:
                for earlier in after:
                    earlier.synchronize()
                started = time.perf_counter()
                if self._emulation.delay_s:
                    time.sleep(self._random.uniform(0, self._emulation.delay_s))
                with torch.no_grad():
                    work()
                if self._emulation.bytes_per_s:
                    left = nbytes / self._emulation.bytes_per_s - (time.perf_counter() - started)
                    if left > 0:
                        time.sleep(left)
            except BaseException as raised:  # handed to whoever waits for the ticket
                error = raised
            ticket.finish(error)
            del item, work, after  # the queue is quiet for long; keep no tensor alive meanwhile


class _CudaTicket:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        # Compute that reads what the work wrote comes after it; the host goes on.
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def order(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class StreamLane:
    """A lane of the CUDA backend: one stream.

    Args:
        device: the CUDA device.
        priority: of the stream; lower runs first.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)
        self.waited_s = 0.0

    def submit(self, work: Work, *, after: Sequence[Ticket] = (), nbytes: int = 0) -> Ticket:
        """See `Lane.submit`."""
        # What compute has been given may still read the block that the work overwrites, or write what it reads.
        self._stream.wait_stream(torch.cuda.current_stream())
        for earlier in after:
            if isinstance(earlier, _CudaTicket):
                earlier.order(self._stream)
            else:
                earlier.synchronize()  # work of the host, such as its Adam
        with torch.cuda.stream(self._stream), torch.no_grad():
            work()
        return _CudaTicket(self._stream)

    def close(self) -> None:
        """Finish what was submitted."""
        self._stream.synchronize()


@dataclass(frozen=True)
class Lanes:
    """The lanes of one module."""

    fetch: Lane
    """Weights, host to device."""
    network: Lane
    """All collectives, in one order that every rank shares."""
    offload: Lane
    """Gradients, device to host."""
    host_adam: Lane
    """Optimizer steps on the host."""

    def by_name(self) -> dict[str, Lane]:
        """The four lanes by what they are for."""
        return {name: getattr(self, name) for name in ("fetch", "network", "offload", "host_adam")}

    def all(self) -> tuple[Lane, ...]:
        """The four lanes."""
        return (self.fetch, self.network, self.offload, self.host_adam)

    def close(self) -> None:
        """Finish and stop all lanes."""
        for lane in self.all():
            lane.close()


def make_lanes(device: torch.device, emulation: Emulation | None = None) -> Lanes:
    """Lanes for compute on `device`; `emulation` is for the CPU's links."""
    host_adam = ThreadLane("host adam", replace(emulation, bytes_per_s=None) if emulation else None)
    if device.type == "cuda":
        # Gathers go before reductions: compute waits for the former.
        return Lanes(StreamLane(device, -1), StreamLane(device, -1), StreamLane(device), host_adam)
    return Lanes(
        ThreadLane("fetch", emulation), ThreadLane("network", emulation), ThreadLane("offload", emulation), host_adam
    )
