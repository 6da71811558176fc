"""Whatever updates do meanwhile, a snapshot has the state of one step, and memory for copies keeps to the pool."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from elixir.checkpoint import snapshot as module
from elixir.checkpoint.snapshot import PartState, Snapshot, SnapshotPool, aligned
from elixir.checkpoint_format import slices as saved_tensor
from elixir.errors import CheckpointError, StateError
from tests.common import inside

SPAN = 256
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, saved_tensor):
        monkeypatch.setattr(each, "SPAN_BYTES", SPAN)


class Flat:
    """A live tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.dtype, self.nbytes = tensor, tensor.dtype, tensor.nbytes

    def values(self, first: int, stop: int) -> torch.Tensor:
        return self.tensor[first:stop]


class Chunk:
    """Two tensors that have one value at a time, the number of the step."""

    def __init__(self, index: int, numel: int) -> None:
        self.index, self.step, self.broken = index, 0, False
        self.tensors = {f"a/{index}": torch.zeros(numel), f"b/{index}": torch.zeros(numel // 3, dtype=torch.int16)}

    def wait(self) -> None:
        if self.broken:
            raise RuntimeError("the update failed")

    def read(self) -> dict[str, Flat]:
        return {key: Flat(tensor) for key, tensor in self.tensors.items()}

    def check(self) -> None:
        pass

    def update(self, dice: random.Random) -> None:
        self.step += 1
        for tensor in self.tensors.values():
            tensor.fill_(-1)  # half-done
            if dice.random() < 0.3:
                time.sleep(dice.random() * 2e-4)
            tensor.fill_(self.step)


class Sink:
    """A file: bytes by key and span, each written once."""

    def __init__(self, dice: random.Random, slow_s: float) -> None:
        self.found: dict[str, dict[int, bytes]] = {}
        self._dice, self._slow_s = dice, slow_s

    def write(self, key: str, number: int, data: memoryview) -> None:
        first = bytes(data)
        if self._slow_s:
            time.sleep(self._dice.random() * self._slow_s)
        assert bytes(data) == first  # what is being written stays as it is
        spans = self.found.setdefault(key, {})
        assert number not in spans
        spans[number] = first

    def tensor(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        spans = self.found[key]
        return torch.frombuffer(bytearray(b"".join(spans[i] for i in range(len(spans)))), dtype=dtype)


def race(seed: int, *, share: float | None = None) -> tuple[Snapshot, SnapshotPool]:
    dice = random.Random(seed)
    chunks = [Chunk(index, dice.choice([1, 63, 64, 65, 500, 1000])) for index in range(dice.randint(1, 7))]
    total = sum(aligned(t.nbytes) for chunk in chunks for t in chunk.tensors.values())
    pool = pool_of(int(total * (dice.choice([0, 0.2, 0.5, 1]) if share is None else share)))
    for chunk in chunks:
        chunk.update(dice)
    snapshot = Snapshot(chunks, pool, CPU)
    sink = Sink(random.Random(seed + 1), dice.choice([0, 1e-4, 1e-3]))
    problems: list[BaseException] = []

    def updates(mine: list[Chunk]) -> None:
        own = random.Random(seed + 2)
        try:
            for _ in range(3):
                for chunk in mine:
                    snapshot.release(chunk.index)
                    chunk.update(own)
        except BaseException as error:
            problems.append(error)

    half = len(chunks) // 2  # the host steps some and the device others
    threads = [threading.Thread(target=updates, args=(part,)) for part in (chunks[:half], chunks[half:])]
    for thread in threads:
        thread.start()
    snapshot.write(sink.write, lambda: None)
    snapshot.end()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert problems == []
    for chunk in chunks:
        for key, tensor in chunk.tensors.items():
            assert not tensor.numel() or (sink.tensor(key, tensor.dtype) == 1).all(), (seed, key)
    assert inside.taken_bytes(pool, most=True) <= pool.limit_bytes
    assert not inside.taken_bytes(pool)
    return snapshot, pool


@pytest.mark.parametrize(("old", "new"), list(itertools.product(PartState, PartState)))
def test_only_the_changes_of_the_table_are_allowed(old: PartState, new: PartState) -> None:
    part = inside.snapshot_part(Chunk(0, 3))
    part.state = old
    if new in inside.transitions(Snapshot)[old]:
        part.to(new)
        assert part.state is new
    else:
        with pytest.raises(StateError, match=f"cannot go from {old.value} to {new.value}"):
            part.to(new)


def test_two_hundred_races() -> None:
    copied = [race(seed)[0].copied_bytes for seed in range(200)]
    assert any(copied)


def test_without_a_pool_updates_wait_and_nothing_is_copied() -> None:
    for seed in range(20):
        snapshot, pool = race(seed, share=0)
        assert (snapshot.copied_bytes, inside.taken_bytes(pool, most=True)) == (0, 0)


def test_an_update_that_failed_fails_the_save_and_not_the_next_update() -> None:
    chunks = [Chunk(0, 100), Chunk(1, 100)]
    chunks[1].broken = True
    snapshot = Snapshot(chunks, pool_of(1 << 20), CPU)
    snapshot.release(1)
    snapshot.release(0)
    assert not snapshot.copied_bytes
    with pytest.raises(CheckpointError, match="the update failed"):
        snapshot.write(Sink(random.Random(0), 0).write, lambda: None)
    snapshot.end()
    snapshot.release(0)


def test_who_keeps_a_save_that_has_ended_keeps_no_chunk() -> None:
    chunk = Chunk(0, SPAN)
    snapshot, alive = Snapshot([chunk], pool_of(0), CPU), weakref.ref(chunk)
    snapshot.write(lambda *_: None, lambda: None)
    del chunk
    assert alive() is not None
    snapshot.end()
    snapshot.release(0)  # an update that was about to ask
    gc.collect()
    assert alive() is None


def test_an_empty_area_does_not_part_the_others() -> None:
    pool = pool_of(1024)
    first, empty, second, third = (pool.take(nbytes) for nbytes in (512, 0, 256, 256))
    for area in (first, second, empty, third):
        assert area is not None
        pool.give_back(area)
    assert pool.take(1024) is not None


def test_copies_from_host_memory_have_nobody_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    event = SimpleNamespace(record=recorded.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    snapshot = Snapshot([Chunk(0, 100)], pool_of(1 << 20), torch.device("cuda", 0))
    snapshot.release(0)
    assert snapshot.copied_bytes
    assert recorded == ["compute"]  # with what it had been given when the snapshot was taken
    snapshot.write(Sink(random.Random(0), 0).write, lambda: None)


def pool_of(nbytes: int) -> SnapshotPool:
    return inside.pool_of(nbytes)


def waiting(snapshot: Snapshot, index: int) -> threading.Thread:
    """A thread that updates a chunk, once it waits for the writer."""
    thread = threading.Thread(target=snapshot.release, args=(index,))
    thread.start()
    while index not in inside.updates_waiting(snapshot) and thread.is_alive():
        time.sleep(1e-3)
    return thread


def test_an_update_copies_what_is_left_of_a_chunk_as_soon_as_there_is_room() -> None:
    """The writer is done with the first of four spans when memory in the pool is given back."""
    numel = 3 * SPAN // 4 + 1
    chunk, pool = Chunk(0, numel), pool_of(4 * SPAN)
    chunk.tensors = {"a/0": torch.arange(float(numel)), "b/0": torch.arange(numel, dtype=torch.int16)}
    expected = {key: tensor.clone() for key, tensor in chunk.tensors.items()}
    taken = pool.take(2 * SPAN)
    assert taken is not None
    snapshot, sink, beats, threads = Snapshot([chunk], pool, CPU), Sink(random.Random(0), 0), [0], []

    def heartbeat() -> None:
        beats[0] += 1
        if beats == [1]:
            threads.append(waiting(snapshot, 0))
            pool.give_back(taken)

    def write(key: str, number: int, data: memoryview) -> None:
        if beats == [1]:
            threads[0].join(20)  # the update goes on before the second span is written
            for tensor in chunk.tensors.values():
                tensor.zero_()
        sink.write(key, number, data)

    snapshot.write(write, heartbeat)
    assert all(torch.equal(sink.tensor(key, each.dtype), each) for key, each in expected.items())
    assert beats == [4 + 2]
    rest = (numel * 4 - SPAN, numel * 2)
    assert snapshot.copied_bytes == sum(map(aligned, rest))
    assert not inside.taken_bytes(pool)


class OnDevice(torch.Tensor):
    """Values that say that they lie on a CUDA device."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]


class DeviceTensor(Flat):
    def values(self, first: int, stop: int) -> torch.Tensor:
        return super().values(first, stop).as_subclass(OnDevice)


class DeviceChunk(Chunk):
    def wait(self) -> None:
        pass

    def read(self) -> dict[str, Flat]:
        return {key: DeviceTensor(tensor) for key, tensor in self.tensors.items()}

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("the layout has changed")


class FakeCuda:
    """Notes what streams and events are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        fake, numbers = self, itertools.count(1)

        class Event:
            def __init__(self) -> None:
                self.number = next(numbers)

            def record(self, stream: Stream) -> None:
                fake.told.append(f"{stream.name} records {self.number}")

            def synchronize(self) -> None:
                fake.told.append(f"host waits for {self.number}")

        class Stream:
            def __init__(self, device: torch.device, name: str = "writer") -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                fake.told.append(f"{self.name} waits for {event.number}")

            def synchronize(self) -> None:
                fake.told.append(f"host waits for {self.name}")

        compute = Stream(OnDevice.device, "compute")
        for name, value in (("Event", Event), ("Stream", Stream), ("current_stream", lambda device: compute)):
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
        self.pieces = 0

        def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
            self.pieces += 1
            return torch.zeros(nbytes, dtype=torch.uint8)

        monkeypatch.setattr(module, "pinned_zeros", pinned)

    def sink(self) -> tuple[Sink, module.WriteSpan]:
        found = Sink(random.Random(0), 0)
        return found, lambda key, number, data: (self.told.append("write"), found.write(key, number, data))[1]


def test_a_device_is_read_after_the_step_before_and_each_piece_is_there_when_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, pool = FakeCuda(monkeypatch), pool_of(0)
    for number in (1, 2):
        chunk = DeviceChunk(0, 100)
        chunk.tensors["a/0"].copy_(torch.arange(100.0))
        snapshot, (sink, write) = Snapshot([chunk], pool, OnDevice.device), cuda.sink()
        snapshot.write(write, lambda: None)
        assert cuda.told == [
            f"compute records {number}",
            f"writer waits for {number}",
            *["host waits for writer", "write"] * 3,  # two spans and one
        ]
        assert torch.equal(sink.tensor("a/0", torch.float32), torch.arange(100.0))
        snapshot.end()
        cuda.told.clear()
    assert cuda.pieces == 1, "the next save uses it again"


def test_copies_that_a_device_makes_are_there_before_they_are_written_or_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, pool = FakeCuda(monkeypatch), pool_of(1 << 12)
    chunk = DeviceChunk(0, 100)
    snapshot, (sink, write) = Snapshot([chunk], pool, OnDevice.device), cuda.sink()
    snapshot.release(0)
    chunk.tensors["a/0"].fill_(9.0)
    snapshot.write(write, lambda: None)
    told = ["compute records 1", "compute records 2", "host waits for 2", *["write"] * 3, "host waits for 2"]
    assert cuda.told == told
    assert not sink.tensor("a/0", torch.float32).any()
    assert not inside.taken_bytes(pool)
    chunk.broken = True
    cuda.told.clear()
    snapshot = Snapshot([chunk], pool, OnDevice.device)
    snapshot.release(0)
    assert cuda.told == ["compute records 3", "host waits for compute"], "what was queued still fills the area"
    assert not inside.taken_bytes(pool)
    with pytest.raises(CheckpointError, match="the layout has changed"):
        snapshot.write(write, lambda: None)
