"""Lanes: where work runs while compute goes on, one lane per resource.

A lane takes work in order and runs it while the caller goes on. `submit` says which memory the work reads and writes,
which is all its order among lanes, and gives a `Ticket`. `Ticket.wait` makes the *compute* that follows wait,
`Ticket.synchronize` makes the *calling thread* wait. On CUDA a lane is a stream and a ticket an event, so neither
compute nor the host stops where it need not. On the CPU a lane is a worker thread, with an optional emulated link (so
many bytes per second) and random delays, so that overlap can be measured and races shaken out without a GPU.

What moves adds to one `StepCounts`, of which reports are made.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch

from elixir.chunk.memory import THREAD, Fate, Memory, Ticket, order
from elixir.errors import InputError
from elixir.torch_private import dispatch_mode_count, without_dispatch_modes

# --- step counts -----------------------------------------------------------------------------------------------------
# `StepCounts`: the counts of one rank while a step runs, for the report that compares them with the plan.


@dataclass
class StepCounts:
    """Loads, bytes over the links, and updates, since a step began; all that moves anything adds to it."""

    loads: int = 0
    hits: int = 0
    """Requirements of the order that were met by what was there: neither loaded for it, nor fetched ahead for it."""
    demand_loads: int = 0
    """Loads that nothing had foreseen: the use had to wait for all of the transfer."""
    deviations: int = 0
    calls: int = 0
    """Calls of the model, or of parts, outside of a forward that `RCache.begin` has announced."""
    begun_anew: int = 0
    """Calls among them with which the order began anew, from its beginning."""
    backwards: int = 0
    host_to_device_bytes: int = 0
    refreshed_bytes: int = 0
    """The part of them that are new weights of the host's Adam."""
    device_to_host_bytes: int = 0
    network_bytes: int = 0
    """Received from other ranks of the replica."""
    replicas_bytes: int = 0
    """Received from other replicas."""
    disk_read_bytes: int = 0
    """States on a disk, and weights in files."""
    disk_written_bytes: int = 0
    early_chunks: int = 0
    """Chunks that were updated early."""
    kept_chunks: int = 0
    """The number of them whose new states were kept."""

    def reset(self) -> None:
        """Begins to count anew."""
        vars(self).update(vars(StepCounts()))


# --- lanes -----------------------------------------------------------------------------------------------------------


Work = Callable[[], object]
_T = TypeVar("_T")


class Lane(Protocol):
    """One resource that works while compute goes on."""

    fate: Fate
    """The first error of all lanes."""
    last: Ticket | None
    """The work that was submitted last."""
    waited_s: float
    """How long compute stood still for this lane; on CUDA how long the threads that submit compute have waited until
    its work was issued, as when it brings weights that the host still updates."""

    def submit(
        self,
        work: Work,
        *,
        reads: Collection[Memory] = (),
        writes: Collection[Memory] = (),
        nbytes: int = 0,
        despite_errors: bool = False,
    ) -> Ticket:
        """Runs `work` after all earlier work of this lane, after compute submitted so far, after the work that writes
        what it reads, and after all users of what it writes.

        Args:
            work: issues copies or collectives; must not touch what compute may still change.
            reads: memory that the work reads. If the last work that writes it has failed, this work fails, too.
            writes: memory that it writes. What is changed in place is read and written.
            nbytes: what it moves; an emulated link takes its time for so many bytes.
            despite_errors: the work runs even if work that wrote what it reads has failed, and checks that itself.
        """
        filling, using = order(reads, writes)
        if despite_errors:
            filling, using = [], [*filling, *using]
        self.last = ticket = self._put(work, filling, using, nbytes)
        for memory in reads:
            memory.used(self, ticket, writes=False)
        for memory in writes:
            memory.used(self, ticket, writes=True)
        return ticket

    def _put(self, work: Work, filling: Sequence[Ticket], using: Sequence[Ticket], nbytes: int) -> Ticket:
        """Runs `work` after other work: some whose errors it shares, and some of which only the end matters."""

    def _follow(self, earlier: Ticket) -> None:
        """Lets the work of this lane that comes next wait for work of another."""

    def _follow_all(self, filling: Sequence[Ticket], using: Sequence[Ticket]) -> None:
        """Lets it wait for all, and only then raises the first error of `filling`. Work that uses the same memory next
        waits for this work alone, so this work must not end before the others."""
        for earlier in (*filling, *using):
            self._follow(earlier)
        for earlier in filling:
            self.fate.check(earlier)

    def ask(self, work: Callable[[], _T]) -> _T:
        """The result of `work`, which gives a device nothing to do, run after all earlier work has been submitted.

        On CUDA the calling thread does not wait for what the device still has to do. An error of `work` is the
        caller's, and no failure of the lane.
        """
        answers: list[_T] = []
        errors: list[BaseException] = []

        def answer() -> None:
            try:
                answers.append(work())
            except BaseException as error:
                errors.append(error)

        self._await_issue(self.submit(answer))  # both lists are empty until the lane's thread fills one
        if errors:
            raise errors[0]
        return answers[0]

    def _await_issue(self, ticket: Ticket) -> None:
        """Blocks this thread until work has run, or a device has been given it."""

    def drain(self) -> None:
        """Blocks this thread until all work that was submitted is over, whether or not it has failed."""
        if self.last is not None:
            self.last.join()

    def take_busy_s(self) -> float:
        """How long it worked since this was last asked; on CUDA, of the work that is known to be over by now."""

    def take_stream_waited_s(self) -> float:
        """How long streams of compute stood still for its work, between the waits that are known to be over by now and
        those of the last call; 0.0 for work of the host, which `waited_s` tells of."""

    def close(self) -> None:
        """Finishes what was submitted, then stops."""


@dataclass(frozen=True)
class Emulation:
    """The link that a CPU lane imitates.

    Attributes:
        bytes_per_s: speed of the link; None for as fast as memory.
        delay_s: work is held back for a random time up to this; for tests.
        seed: of the delays.
        disk_bytes_per_s: speed of the disk; None for as fast as it is.
        blocking: the thread that submits work waits for it, so that nothing overlaps; to see what overlap is worth.
    """

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    seed: int = 0
    blocking: bool = False
    disk_bytes_per_s: float | None = None


class _ThreadTicket:
    def __init__(self, lane: ThreadLane) -> None:
        self._lane = lane
        self._event = threading.Event()
        self.error: BaseException | None = None
        self.drained = lane.fate.drained

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self._lane.fate.meet(error)
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def join(self) -> None:
        if not self._event.is_set():
            started = time.perf_counter()
            self._event.wait()  # the lane's thread still reads or writes the buffers of the work
            if not THREAD.is_lane:
                self._lane.waited_s += time.perf_counter() - started

    def synchronize(self) -> None:
        self.join()
        self._lane.fate.check(self)

    wait = synchronize  # compute on the CPU is the calling thread


class ThreadLane(Lane):
    """A lane of the CPU backend: one worker thread.

    Args:
        name: of the thread.
        emulation: link speed and delays.
        device: the CUDA device that its thread is on, if any.
        fate: of all lanes.
    """

    def __init__(
        self,
        name: str,
        emulation: Emulation | None = None,
        *,
        device: torch.device | None = None,
        fate: Fate | None = None,
    ) -> None:
        self.fate, self.last = fate or Fate(), None
        self._emulation = emulation or Emulation()
        self._device = device
        self._random = random.Random(f"{self._emulation.seed} {name}")
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], None], int, _ThreadTicket] | None] = queue.SimpleQueue()
        self.waited_s = 0.0
        self._busy_s = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"elixir {name}", daemon=True)
        self._thread.start()

    def _put(self, work: Work, filling: Sequence[Ticket], using: Sequence[Ticket], nbytes: int) -> Ticket:
        if self._closed:
            raise closed()
        ticket = _ThreadTicket(self)  # compute on the CPU is done with what it was given by now
        self._queue.put((work, partial(self._follow_all, filling, using), nbytes, ticket))
        if self._emulation.blocking:
            ticket.join()  # protects nothing: the link is to look as if it could not overlap
        return ticket

    def _await_issue(self, ticket: Ticket) -> None:
        ticket.join()

    def _follow(self, earlier: Ticket) -> None:
        earlier.join()  # the work reads what `earlier` writes, or writes what it uses

    def take_busy_s(self) -> float:
        """See `Lane.take_busy_s`."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def take_stream_waited_s(self) -> float:
        """See `Lane.take_stream_waited_s`."""
        return 0.0

    def close(self) -> None:
        """Finishes and joins the thread."""
        self._closed = True
        if self._thread.is_alive():
            self._queue.put(None)
            if threading.current_thread() is not self._thread:  # a module may be let go of by its own last work
                self._thread.join()

    def _run(self) -> None:
        THREAD.is_lane = True
        if self._device is not None:
            torch.cuda.set_device(self._device)  # otherwise waiting for an event makes a context on device 0
        while (item := self._queue.get()) is not None:
            work, follow, nbytes, ticket = item
            error: BaseException | None = None
            try:
                follow()
                started = time.perf_counter()
                if self._emulation.delay_s:
                    time.sleep(self._random.uniform(0, self._emulation.delay_s))
                with torch.no_grad():
                    work()
                if self._emulation.bytes_per_s:
                    left = nbytes / self._emulation.bytes_per_s - (time.perf_counter() - started)
                    if left > 0:
                        time.sleep(left)
                self._busy_s += time.perf_counter() - started
            except BaseException as raised:  # handed to the thread that waits for the ticket
                error = raised
            ticket.finish(error)
            del item, work, follow  # the queue is quiet for long; keep no tensor alive meanwhile


def closed() -> InputError:
    """The error of using a module that was closed."""
    return InputError(
        "this ElixirModule was closed, and cannot run or give its weights any more; its model, module.module, is an "
        "ordinary one again, which can"
    )


class _CudaTicket:
    """A ticket of work that has been, or will be, issued to a stream."""

    def __init__(self, lane: StreamLane) -> None:
        self._lane = lane
        self._issued = threading.Event()
        self._event: torch.cuda.Event | None = None
        """Recorded after the work; None if that could not be issued."""
        self.error: BaseException | None = None
        self.drained = lane.fate.drained

    def issue(self, event: torch.cuda.Event | None, error: BaseException | None = None) -> None:
        self._event, self.error = event, error
        self._lane.fate.meet(error)
        self._issued.set()

    def issued(self) -> bool:
        return self._issued.is_set()

    def done(self) -> bool:
        return self._issued.is_set() and (self._event is None or bool(self._event.query()))

    def wait(self) -> None:
        stream, event = torch.cuda.current_stream(self._lane.device), self.until_issued()
        self._lane.fate.check(self)
        if event is None:
            return
        # Times nothing that is over by now, and no lane that waits for another.
        times = not (THREAD.is_lane or event.query())
        reached = _recorded(stream, timed=True) if times else None
        stream.wait_event(event)  # compute that reads what the work wrote comes after it
        if reached is not None:
            self._lane.waits.append((reached, _recorded(stream, timed=True)))

    def join(self) -> None:
        if (event := self.until_issued()) is not None:
            event.synchronize()  # the calling thread reads on the host what the stream writes, or frees it

    def synchronize(self) -> None:
        self.join()
        self._lane.fate.check(self)

    def order(self, stream: torch.cuda.Stream) -> None:
        # What `stream` is given next uses the buffers of the work.
        if (event := self.until_issued()) is not None:
            stream.wait_event(event)

    def until_issued(self) -> torch.cuda.Event | None:
        if not self._issued.is_set():
            started = time.perf_counter()
            self._issued.wait()  # no event exists before: to go on without would leave the buffers unprotected
            if not THREAD.is_lane:
                self._lane.waited_s += time.perf_counter() - started
        return self._event


_SPANS_KEPT = 4096
"""How many spans of work are kept whose time nobody has asked for, as when a model only generates."""


def _own_modes() -> contextlib.AbstractContextManager[Any]:
    """Runs work that the caller's thread issues without that thread's dispatch modes, as on a thread of the lane:
    selective activation checkpointing would keep the block that a chunk is copied into."""
    return without_dispatch_modes() if dispatch_mode_count() else contextlib.nullcontext()


def _recorded(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


_Spans = deque[tuple[torch.cuda.Event, torch.cuda.Event]]
"""Events at the beginning and the end of work, or of a wait."""


def _taken_s(spans: _Spans) -> float:
    """Takes out the spans that are over, and returns their sum."""
    taken_s = 0.0
    while spans:
        # Taken out first: a thread that appends to a full deque drops what is at its left between two looks.
        span = started, ended = spans.popleft()
        if not ended.query():
            spans.appendleft(span)
            break
        taken_s += started.elapsed_time(ended) / 1e3
    return taken_s


class StreamLane(Lane):
    """A lane of the CUDA backend: one stream.

    Work is issued at once, by the caller. Only what builds on work of the host, such as its Adam, is issued later, by a
    thread of the lane's own: the caller, who has compute to submit, must not wait for it. What comes after it in this
    lane then goes the same way.

    Args:
        device: the CUDA device.
        priority: of the stream; lower runs first.
        fate: of all lanes.
    """

    def __init__(self, device: torch.device, priority: int = 0, *, fate: Fate | None = None) -> None:
        self.device, self.fate, self.last = device, fate or Fate(), None
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._issuer: ThreadLane | None = None
        self._closed = False
        self._spans: _Spans = deque(maxlen=_SPANS_KEPT)
        self.waits: _Spans = deque(maxlen=_SPANS_KEPT)
        """Waits of streams of compute for this one."""
        self.waited_s = 0.0

    def _await_issue(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _CudaTicket)
        ticket.until_issued()

    def _put(self, work: Work, filling: Sequence[Ticket], using: Sequence[Ticket], nbytes: int) -> _CudaTicket:
        if self._closed:
            raise closed()
        # Compute that was submitted so far may still read the block that the work overwrites, or write what it reads.
        # Recorded here and not when the work is issued: compute submitted meanwhile would be waited for, too, and the
        # overlap be lost.
        given = _recorded(torch.cuda.current_stream(self.device))
        behind = self.last is not None and not cast(_CudaTicket, self.last).issued()
        ticket = _CudaTicket(self)
        issue = partial(self._issue, work, given, partial(self._follow_all, filling, using), ticket)
        if not behind and all(
            earlier.issued() if isinstance(earlier, _CudaTicket) else earlier.done() for earlier in (*filling, *using)
        ):
            issue()
            self.fate.check(ticket)
        else:
            self._issuer = self._issuer or ThreadLane("issuer", device=self.device, fate=self.fate)
            self._issuer.submit(issue)
        return ticket

    def take_busy_s(self) -> float:
        """See `Lane.take_busy_s`."""
        return _taken_s(self._spans)

    def take_stream_waited_s(self) -> float:
        """See `Lane.take_stream_waited_s`."""
        return _taken_s(self.waits)

    def close(self) -> None:
        """Finishes what was submitted."""
        self._closed = True
        if self._issuer is not None:
            self._issuer.close()
        self._stream.synchronize()  # the caller frees the blocks that the stream still uses

    def _follow(self, earlier: Ticket) -> None:
        if isinstance(earlier, _CudaTicket):
            earlier.order(self._stream)
        else:
            earlier.join()  # work of the host, such as its Adam: the stream would copy weights that are half new

    def _issue(self, work: Work, given: torch.cuda.Event, follow: Callable[[], None], ticket: _CudaTicket) -> None:
        try:
            # Compute may still read the block that the work overwrites, or write the gradient that it reads.
            self._stream.wait_event(given)
            follow()
            # The pair times the work for `take_busy_s`. Others wait for `event` before they use its buffers.
            started, event = _recorded(self._stream, timed=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad(), _own_modes():
                work()
            event.record(self._stream)
            self._spans.append((started, event))
        except BaseException as error:  # raised where the ticket is waited for
            ticket.issue(None, error)
        else:
            ticket.issue(event)


@dataclass(frozen=True)
class Lanes:
    """The lanes of one module. Each says which work it overlaps, and which memory its order protects."""

    fetch: Lane
    """Weights and activations, host to device. The next chunk is copied while compute uses this one. Each copy comes
    after the compute submitted before it, which may still read the block that it fills."""
    network: Lane
    """All collectives. The next gather and the last reduction run while compute goes on. One lane for both, since all
    ranks must start their collectives in the same order, and a second communicator would need more buffers."""
    offload: Lane
    """Gradients and activations, device to host. A chunk's gradients leave while backward computes those of the chunk
    before. Apart from `fetch`, both directions of the link are used at once. A gradient block is reused only after its
    copy."""
    host_adam: Lane
    """Optimizer steps on the host, while the device computes and other lanes move data. One thread takes the chunks in
    order, so that two steps never share the host's cores. The steps touch host memory only, so they need not come after
    compute of the device."""
    refresh: Lane
    """New weights of the host's Adam to where they live on the device, while the next chunk is stepped. On `fetch`,
    the first prefetch of the next step would queue after every pending update."""
    disk: Lane
    """Masters and states between a disk and host memory. The next chunk is read while this one is stepped. Reads and
    writes share one order, so that a read of a chunk's states finds what the step before has written."""

    fate: Fate
    """The first error of any of them."""
    counts: StepCounts
    """The counts of all work on them in this step."""

    def count_anew(self) -> None:
        """Begins to count anew, and to measure how long compute waits."""
        self.counts.reset()
        for lane in self.all():
            lane.waited_s = 0.0

    def drain(self) -> None:
        """Blocks this thread until all work is over. Nobody who waits for work that has failed learns of it any more:
        `Fate.error` says it."""
        for lane in self.all():
            lane.drain()
        self.fate.drained += 1

    def by_name(self) -> dict[str, Lane]:
        """The lanes by what they are for."""
        return {name: getattr(self, name) for name in _NAMES}

    def all(self) -> tuple[Lane, ...]:
        """The lanes."""
        return tuple(self.by_name().values())

    def close(self) -> None:
        """Finishes and stops all lanes."""
        for lane in self.all():
            lane.close()


_NAMES = tuple(field.name for field in fields(Lanes) if field.name not in ("fate", "counts"))


def make_lanes(device: torch.device, emulation: Emulation | None = None) -> Lanes:
    """Lanes for compute on `device`; `emulation` is for the CPU's links."""
    fate = Fate()
    if device.type == "cuda":
        # A lower number runs first. Compute waits for weights that are fetched, gathered and refreshed, so a kernel
        # that fills the device must not delay their copies. It waits for offloads only if it lacks gradient blocks.
        fetch, network, refresh = (StreamLane(device, -1, fate=fate) for _ in range(3))
        offload, host_adam = StreamLane(device, fate=fate), ThreadLane("host adam", device=device, fate=fate)
        disk_lane = ThreadLane("disk", device=device, fate=fate)
        return Lanes(fetch, network, offload, host_adam, refresh, disk_lane, fate, StepCounts())
    disk = None if emulation is None else replace(emulation, bytes_per_s=emulation.disk_bytes_per_s)
    how = dict.fromkeys(_NAMES, emulation) | {"disk": disk}
    with contextlib.ExitStack() as started:  # the system may have no more threads
        lanes: dict[str, Lane] = {}
        for name, each in how.items():
            lanes[name] = lane = ThreadLane(name.replace("_", " "), each, fate=fate)
            started.callback(lane.close)
        started.pop_all()
    return Lanes(**lanes, fate=fate, counts=StepCounts())
