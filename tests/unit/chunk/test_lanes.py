"""Lanes of the CPU: order, overlap, emulated links and delays, errors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.chunk import lanes as lanes_file
from elixir.chunk.lanes import Emulation, Lane, StreamLane, ThreadLane, Work, make_lanes
from elixir.chunk.memory import Memory, Ticket
from elixir.errors import InputError


def filled(lane: Lane, work: Work) -> Memory:
    """Memory that work of a lane fills."""
    memory = Memory()
    lane.submit(work, writes=[memory])
    return memory


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    found = ThreadLane("test")
    yield found
    found.close()


def test_an_error_reaches_everyone_who_waits_and_nobody_else(lane: ThreadLane) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    other = ThreadLane("other")
    memory = filled(lane, fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            memory.wait()
    ran: list[int] = []
    with pytest.raises(ZeroDivisionError):
        other.submit(lambda: ran.append(1), reads=[memory]).synchronize()
    assert not ran  # what it builds on is not there
    lane.submit(lambda: ran.append(2)).wait()
    assert ran == [2]
    other.close()


def test_closing_finishes_what_was_submitted(lane: ThreadLane) -> None:
    seen: list[int] = []
    for i in range(20):
        lane.submit(lambda i=i: seen.append(i))
    lane.close()
    assert seen == list(range(20))
    lane.close()  # twice does no harm
    with pytest.raises(InputError, match="was closed"):
        lane.submit(lambda: seen.append(20))


class Opening(threading.Event):
    """Opens a gate when a thread waits for this."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def wait(self, timeout: float | None = None) -> bool:
        self._gate.set()
        return super().wait(timeout)


class Clock:
    """A clock that only sleeping moves on."""

    def __init__(self) -> None:
        self.now_s, self.slept_s = 50.0, list[float]()

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lanes_file, "time", clock)
    return clock


def once_waited_for(lane: ThreadLane, work: Callable[[], object], nbytes: int = 0) -> Ticket:
    """Work that a lane begins when somebody waits for it."""
    gate = threading.Event()
    ticket = lane.submit(lambda: (gate.wait(), work()), nbytes=nbytes)
    ticket._event = Opening(gate)  # type: ignore[attr-defined]
    return ticket


def test_an_emulated_link_takes_its_time(clock: Clock) -> None:
    lane = ThreadLane("link", Emulation(bytes_per_s=1e6))
    once_waited_for(lane, lambda: clock.sleep(0.004), nbytes=10_000).wait()
    assert clock.slept_s == [0.004, pytest.approx(0.006)]  # the rest of its time
    once_waited_for(lane, lambda: clock.sleep(0.004), nbytes=3_000).wait()  # itself takes longer than that
    once_waited_for(lane, lambda: clock.sleep(0.004), nbytes=1_000).wait()
    assert clock.slept_s[2:] == [0.004, 0.004]
    assert lane.waited_s == pytest.approx(clock.now_s - 50) == pytest.approx(0.018)
    assert lane.take_busy_s() == pytest.approx(0.018)
    assert lane.take_busy_s() == 0.0
    lane.close()


def test_blocking_lanes_leave_nothing_running() -> None:
    lane = ThreadLane("blocking", Emulation(bytes_per_s=1e6, blocking=True))
    assert all(lane.submit(lambda: None, nbytes=20_000).done() for _ in range(3))
    lane.close()


class FakeStream:
    """Takes note of what a CUDA stream is asked."""

    last: FakeStream

    def __init__(self, *_: Any, **__: Any) -> None:
        FakeStream.last = self
        self.calls: list[str] = []
        self.devices: list[tuple[int, torch.device]] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.calls.append(f"wait for {event.what}")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class FakeEvent:
    is_over = True

    def query(self) -> bool:
        return self.is_over

    def __init__(self, enable_timing: bool = False) -> None:
        self.what, self.at = "nothing", 0

    def record(self, stream: FakeStream) -> None:
        self.what, self.at = stream.calls[-1] if stream.calls else "compute", len(stream.calls)

    def elapsed_time(self, ended: FakeEvent) -> float:
        """Seconds in milliseconds: each entry of a stream takes one."""
        return 1000.0 * (ended.at - self.at)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """Gives the stream of compute."""
    compute = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: compute.devices.append((threading.get_ident(), device))
    )
    return compute


def test_a_stream_lane_does_not_hold_compute_up_for_the_host(cuda: FakeStream) -> None:
    host, lane = ThreadLane("host"), StreamLane(torch.device("cuda", 0))
    calls, gate = FakeStream.last.calls, threading.Event()
    lane.submit(lambda: calls.append("first")).wait()
    assert calls == ["wait for compute", "first"]
    assert cuda.calls == ["wait for first"]
    updated, memories = filled(host, gate.wait), [Memory(), Memory()]
    work = partial(calls.append, "second")
    second = lane.submit(work, reads=[updated], writes=memories[:1])  # comes back though the host is not done
    third = lane.submit(lambda: calls.append("third"), writes=memories[1:])
    assert calls[2:] == []
    assert not second.done()
    assert lane.waited_s == 0.0
    third._issued = Opening(gate)  # the host goes on once this thread waits
    third.wait()
    assert 0.0 < lane.waited_s < 60.0
    waited_s = lane.waited_s
    second.wait()
    assert lane.waited_s == waited_s
    assert [what for what in calls if not what.startswith("wait")] == ["first", "second", "third"]
    fourth = lane.submit(lambda: calls.append("fourth"), reads=memories)
    assert calls[-3:] == ["wait for second", "wait for third", "fourth"]
    fourth.wait()
    lane.close()
    host.close()


def test_work_that_the_caller_issues_runs_without_the_modes_of_the_caller(cuda: FakeStream) -> None:
    seen: list[str] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    lane, block = StreamLane(torch.device("cuda", 0)), torch.zeros(2)
    with Seeing():
        block.neg()
        lane.submit(lambda: block.copy_(torch.ones(2))).wait()
        block.abs()
    assert seen == ["neg.default", "abs.default"]
    assert block.tolist() == [1.0, 1.0]
    lane.close()


def test_a_stream_lane_is_busy_while_its_work_runs(cuda: FakeStream) -> None:
    lane = StreamLane(torch.device("cuda", 0))
    for copies in (["first", "second"], ["third"]):
        lane.submit(partial(FakeStream.last.calls.extend, copies)).wait()
    assert lane.take_busy_s() == 3.0
    lane.close()


def test_waits_of_streams_are_timed_while_they_last(cuda: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """By events around the wait of compute; work that is over keeps nobody waiting, and needs none."""
    lane = StreamLane(torch.device("cuda", 0))
    lane.submit(lambda: None).wait()
    assert lane.take_stream_waited_s() == 0.0
    monkeypatch.setattr(FakeEvent, "is_over", False)
    lane.submit(lambda: None).wait()
    assert lane.take_stream_waited_s() == 0.0, "nobody knows yet how long"
    monkeypatch.setattr(FakeEvent, "is_over", True)
    assert lane.take_stream_waited_s() == 1.0
    assert lane.take_stream_waited_s() == 0.0
    lane.close()


def test_who_asks_a_stream_lane_waits_for_no_device(cuda: FakeStream) -> None:
    """The lane's events have nothing that the host could wait for."""
    host, lane = ThreadLane("host"), StreamLane(torch.device("cuda", 0))
    calls, gate = FakeStream.last.calls, threading.Event()
    assert lane.ask(lambda: len(calls)) == 1
    lane.submit(lambda: calls.append("after the host"), reads=[filled(host, gate.wait)])
    threading.Timer(0.05, gate.set).start()
    assert lane.ask(lambda: calls[-2:]) == ["after the host", "wait for compute"]  # in its order all the same
    with pytest.raises(ZeroDivisionError):
        lane.ask(lambda: 1 / 0)
    assert host.ask(lambda: 3) == 3
    lane.close()
    with pytest.raises(InputError, match="was closed"):
        lane.ask(lambda: calls)
    host.close()


def test_work_of_a_stream_is_done_when_its_event_is_over(cuda: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    host, lane, gate = ThreadLane("host"), StreamLane(torch.device("cuda", 0)), threading.Event()

    def fail() -> None:
        gate.wait()
        raise ZeroDivisionError

    ticket, failed = lane.submit(lambda: None), lane.submit(lambda: None, reads=[filled(host, fail)])
    assert not failed.done()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    assert failed.done()
    for over in (False, True):
        monkeypatch.setattr(FakeEvent, "is_over", over)
        assert ticket.done() is over
    lane.close()
    host.close()


def test_a_stream_lane_ends_with_what_still_waits_for_the_host(cuda: FakeStream) -> None:
    """Its thread issues that, and stops; the caller then frees the blocks that the stream has used."""
    host, lane = ThreadLane("host"), StreamLane(torch.device("cuda", 0))
    calls, gate = FakeStream.last.calls, threading.Event()
    before = set(threading.enumerate())
    lane.submit(lambda: calls.append("after the host"), reads=[filled(host, gate.wait)])
    (issuer,) = set(threading.enumerate()) - before
    threading.Timer(0.05, gate.set).start()
    lane.close()
    assert calls[-2:] == ["after the host", "synchronize"]
    assert not issuer.is_alive()
    host.close()


def test_the_host_waits_for_an_event_of_a_stream(cuda: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """`synchronize` is for the thread that calls it, `wait` for compute."""
    lane, waited = StreamLane(torch.device("cuda", 0)), list[str]()
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: waited.append(self.what), raising=False)
    ticket = lane.submit(lambda: FakeStream.last.calls.append("copy"))
    assert not waited
    ticket.synchronize()
    assert waited == ["copy"]
    assert cuda.calls == []
    lane.close()


def test_threads_of_a_cuda_device_are_on_that_device(cuda: FakeStream) -> None:
    device = torch.device("cuda", 1)
    lanes, gate = make_lanes(device), threading.Event()
    threads = [lanes.host_adam, lanes.disk]
    waiting = lanes.refresh.submit(lambda: None, reads=[filled(lanes.host_adam, gate.wait)])  # starts the issuer
    gate.set()
    waiting.wait()
    found: list[int] = []
    for lane in threads:
        lane.submit(lambda: found.append(threading.get_ident())).wait()
    assert len(cuda.devices) == 3
    assert {device for _, device in cuda.devices} == {device}
    assert set(found) < {thread for thread, _ in cuda.devices}
    lanes.close()
