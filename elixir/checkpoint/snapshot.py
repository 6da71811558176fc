"""`Snapshot`: the states of one step, written from where they lie while training goes on.

The writer reads a chunk's states from live memory. Code that is about to change them calls `release` first. If the
writer is done with the chunk, or its states are copied, the update goes on. If the pool has room, the states are copied
and the update goes on. Otherwise the update waits until the writer has written this very chunk. So memory never exceeds
the pool, and what is written is the state of one step whatever updates do.

A writer in the order of the updates would walk in step with them: each update would find its chunk being written. So
once updates have begun, the writer goes on from the far end.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from elixir.checkpoint_format.slices import SPAN_BYTES, Slice, memory_of, span_count
from elixir.chunk.host_buffers import BufferKind, HostBuffers
from elixir.chunk.memory import Memory, pinned_zeros
from elixir.errors import CheckpointError, StateError
from elixir.hardware.process_memory import give_back_freed
from elixir.optimizer_states import BLOCK_NUMEL
from elixir.plan.prediction import CHECKPOINT_PART
from elixir.wrapper.training_states import ChunkStates, SmallStates, StateTensor

WriteSpan = Callable[[str, int, memoryview], None]
"""Takes (key, number of the span, bytes)."""


COPIES = "copies for a checkpoint"
"""Kind of host buffers: states that are about to change are copied there, if they are not written yet."""
ALIGNMENT_BYTES = 64
"""Alignment of every area and of every tensor in one: a cache line, and a multiple of every element."""


def aligned(nbytes: int) -> int:
    """Bytes that something takes in an area."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class SnapshotPool:
    """Areas of one host buffer, which is made when the first is taken.

    Args:
        buffers: get the kind `COPIES`, instead of one that they have.
        limit_bytes: size of the buffer; 0 is a pool that has no room, so that updates wait for the disk.
    """

    def __init__(self, buffers: HostBuffers, limit_bytes: int) -> None:
        self._buffers, self.limit_bytes = buffers, limit_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.piece: torch.Tensor | None = None
        """Pinned memory through which the writer of a save reads a device. The next save uses it again, because pinning
        and freeing make the driver wait for the device."""
        buffers.replace(BufferKind(COPIES, CHECKPOINT_PART, self.limit_bytes, count=1, at_once=False))

    def take(self, nbytes: int) -> Memory | None:
        """Takes an area of `nbytes`; None if it does not fit now."""
        if nbytes > self.limit_bytes or not self.limit_bytes:
            return None
        if not self._buffers.of(COPIES)[0].tensor.nbytes:
            give_back_freed()  # of the last step
        return self._buffers.lend_inside(COPIES, aligned(nbytes))

    def give_back(self, area: Memory) -> None:
        """Frees an area."""
        self._buffers.give_back(COPIES, area)


def key_of(kind: str, name: str) -> str:
    """Key of a tensor of a parameter, such as ``weight/<name>``."""
    return f"{kind}/{name}"


class ChunkReader:
    """One chunk as a `Snapshot` reads it; the read also records the counts of steps."""

    def __init__(self, states: ChunkStates, small: dict[str, SmallStates]) -> None:
        self._states, self._small, self.chunk = states, small, states.chunk
        found = states.tensors()
        self.layout = {key_of(each.kind, each.name): each for each in found}
        self.states_only = found[len(self.chunk.held) :]
        """The tensors after those of the weights."""
        # Without masters, resident weights are what the model reads: anybody may write to them, and nobody tells.
        exposed = self.chunk.masters is None and self.chunk.weights is not None
        self._versions = [(slot.parameter, slot.parameter._version, slot.name) for slot in self.chunk.slots if exposed]

    def slices(self) -> list[Slice]:
        """The slices that the file of this rank has of the chunk."""
        found = []
        for key, each in self.layout.items():
            block_numel = BLOCK_NUMEL if each.has_codes else None
            numel = each.tensor.numel()
            found.append(Slice(key, each.shape, each.dtype, each.first, numel, block_numel, each.order))
        return found

    def wait(self) -> None:
        """Waits for the update that was under way when the snapshot was taken; raises what it raised."""
        self._states.wait()  # the step before the save still writes the masters and states to be read

    def read(self) -> dict[str, StateTensor]:
        """Returns key -> tensor and records small values; called once, before anything changes."""
        found: dict[str, StateTensor] = {key_of(each.kind, each.name): each for each in self._states.tensors()}
        if {key: each.nbytes for key, each in found.items()} != {key: e.nbytes for key, e in self.layout.items()}:
            raise StateError(f"the states of chunk {self.chunk.index} changed their layout while they were saved")
        self._small |= self._states.small()
        return found

    def check(self) -> None:
        """Refuses weights that were written to, by no step, while they were read."""
        for parameter, version, name in self._versions:
            if parameter._version != version:
                raise CheckpointError(
                    f"{name} was written to while it was being saved; call wait() of the save before, or write inside "
                    "of gathered(write=True), which waits"
                )


class PartState(enum.Enum):
    """How far the writer is with a chunk, and who holds the bytes that are still to be written."""

    LIVE = "live"
    """Memory of the chunk holds the bytes; nobody reads it now."""
    WRITING = "writing"
    """Memory of the chunk holds the bytes, and the writer reads it."""
    COPYING = "copying"
    """The pool has an area for the bytes, into which the updating thread copies."""
    COPIED = "copied"
    """The pool holds the bytes."""
    DONE = "done"
    """All bytes are written, or nobody wants them any more."""


_ALLOWED = {
    PartState.LIVE: (PartState.WRITING, PartState.COPYING, PartState.DONE),
    PartState.WRITING: (PartState.COPYING, PartState.DONE),
    PartState.COPYING: (PartState.COPIED, PartState.DONE),
    PartState.COPIED: (PartState.DONE,),
    PartState.DONE: (),
}


@dataclass
class _Rest:
    """The part of one tensor that is left to write."""

    key: str
    live: StateTensor
    span: int
    """Number of the next span."""
    copied: torch.Tensor | None = None
    """Bytes from that span on, in the pool."""

    @property
    def nbytes(self) -> int:
        return max(0, self.live.nbytes - self.span * SPAN_BYTES)


class _Part:
    """One chunk."""

    def __init__(self, states: ChunkReader) -> None:
        self.states = states
        self.state = PartState.LIVE
        self.rest: list[_Rest] | None = None
        """The tensors that are left; None until it was read for the first time."""
        self.area: Memory | None = None
        self.handed_over = False
        """Whether the writer has left the rest to an update, none of which has begun to copy it."""
        self.arrived: torch.cuda.Event | None = None
        """Event after the copies into the pool, if they come from a device."""
        self.lock = threading.Lock()

    def to(self, state: PartState) -> None:
        if state not in _ALLOWED[self.state]:
            raise StateError(f"a chunk of a snapshot cannot go from {self.state.value} to {state.value}")
        self.state = state

    def read(self) -> list[_Rest]:
        """Returns the data to write, read once: by the writer, or by the first update after the snapshot."""
        with self.lock:
            if self.rest is None:
                self.states.wait()  # an update from before the snapshot still writes the memory that is read
                self.rest = [_Rest(key, live, 0) for key, live in self.states.read().items() if live.nbytes]
            return self.rest

    @property
    def rest_bytes(self) -> int:
        """Room that a copy takes in the pool."""
        return sum(aligned(each.nbytes) for each in self.rest or ())


class Snapshot:
    """States of one step, on their way to a file.

    Args:
        chunks: in the order in which they are updated next.
        pool: for copies.
        device: where compute runs.
    """

    def __init__(self, chunks: Sequence[ChunkReader], pool: SnapshotPool, device: torch.device) -> None:
        self._parts = [_Part(states) for states in chunks]
        self._pool, self._device = pool, device
        self._turn = threading.Condition()
        self._wanted: list[int] = []
        """Chunks that an update waits for or has waited for, first come first."""
        self._begun = False
        """Whether updates of the next step have come."""
        self.stall_s = 0.0
        """How long updates waited here, copying included."""
        self.copied_bytes = 0
        self._taken = self._recorded()
        """Event after the compute that had been submitted when the snapshot was taken: device memory is as it is
        then."""
        self._given_up: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        """The stream on which the writer reads a device."""

    def release(self, index: int) -> None:
        """Returns when nothing is read from the memory of a chunk's states, which are about to change."""
        part, area = self._parts[index], None
        started = time.perf_counter()
        try:
            with self._turn:
                self._begun = True
                if part.state is PartState.DONE:
                    return
            part.read()
            with self._turn:
                area = self._area_of(part)
                if area is None:
                    self._wanted.append(index)
                    # The writer, or another update, reads this chunk's live memory, which the caller is about to
                    # change.
                    self._turn.wait_for(lambda: part.state in (PartState.DONE, PartState.COPIED) or part.handed_over)
                    area, part.handed_over = part.area if part.handed_over else None, False
            if area is not None:
                self._copy(part, area)
        except BaseException as error:
            # The update must go on, and a checkpoint of half a chunk is none.
            with self._turn:
                self._given_up = self._given_up or error  # before the writer finds nothing left to write
                if part.state is PartState.COPYING and (area is not None or part.handed_over):
                    part.to(PartState.DONE)
                    if self._device.type == "cuda":
                        # What was queued still fills the area, which another save may get.
                        torch.cuda.current_stream(self._device).synchronize()
                    self._drop(part)
            self._give_up()
            if not isinstance(error, Exception):  # such as an interrupt, which is for the caller
                raise
        finally:
            with self._turn:  # the CPU-Adam thread and the thread of the device's steps both add to it
                self.stall_s += time.perf_counter() - started

    def _area_of(self, part: _Part) -> Memory | None:
        """Takes an area of the pool for the chunk; None while it is read, or without room."""
        if part.state is not PartState.LIVE:
            return None
        part.area = self._pool.take(part.rest_bytes)
        if part.area is not None:
            part.to(PartState.COPYING)
        return part.area

    def _copy(self, part: _Part, area: Memory) -> None:
        at, by_device = 0, False
        for each in part.read():
            size = each.live.dtype.itemsize
            first = each.span * SPAN_BYTES // size
            each.copied = area.tensor[at : at + each.nbytes]
            values = each.live.values(first, each.live.nbytes // size)
            by_device |= values.is_cuda
            # On a device this is queued after compute, and before the step that replaces the values.
            each.copied.view(each.live.dtype).copy_(values, non_blocking=True)
            at += aligned(each.nbytes)
        part.states.check()
        self.copied_bytes += at
        # Copies from host memory are there by now: an event would only have the writer wait for compute.
        arrived = self._recorded() if by_device else None
        with self._turn:
            part.arrived = arrived
            part.to(PartState.COPIED)
            self._turn.notify_all()

    def write(self, write_span: WriteSpan, heartbeat: Callable[[], None]) -> None:
        """Writes everything, one chunk after the other; afterwards nothing reads live memory.

        Args:
            write_span: of the file.
            heartbeat: called between spans.

        Raises:
            CheckpointError: the states of a chunk could not be copied.
        """
        while (index := self._next()) is not None:
            self._write_part(index, self._parts[index], write_span, heartbeat)

    def _next(self) -> int | None:
        """Chooses the chunk to write now: one that an update waits for, then live ones, then copies. None: all are
        written."""
        with self._turn:
            while True:
                self._refuse_given_up()
                live = [i for i, part in enumerate(self._parts) if part.state is PartState.LIVE]
                copied = [i for i, part in enumerate(self._parts) if part.state is PartState.COPIED]
                waiting = [i for i in self._wanted if i in live]
                found = waiting or (live[::-1] if self._begun else live) or copied
                if found:
                    part = self._parts[found[0]]
                    if part.state is PartState.LIVE:
                        part.to(PartState.WRITING)
                    return found[0]
                if all(part.state is PartState.DONE for part in self._parts):
                    return None
                self._turn.wait()  # until the last copy is made

    def _refuse_given_up(self) -> None:
        if self._given_up is not None:
            raise CheckpointError(f"the states of a step could not be read: {self._given_up}") from self._given_up

    def _write_part(self, index: int, part: _Part, write_span: WriteSpan, heartbeat: Callable[[], None]) -> None:
        rest = part.read()
        copied = part.state is PartState.COPIED
        if copied and part.arrived is not None:
            part.arrived.synchronize()  # the copies in the pool are made by the device
        while rest:
            each = rest[0]
            for number, data in self._spans(each):
                write_span(each.key, number, data)
                each.span = number + 1
                del data
                heartbeat()
                if not copied and self._hand_over(index, part):
                    return
            rest.pop(0)
        if not copied:
            part.states.check()
        with self._turn:
            self._refuse_given_up()
            part.to(PartState.DONE)
            self._drop(part)
            self._turn.notify_all()

    def _spans(self, each: _Rest) -> Iterator[tuple[int, memoryview]]:
        """Yields the spans that are left of one tensor; the bytes stay as they are until the next span is asked for."""
        size, source, base = each.live.dtype.itemsize, each.copied, each.span
        for number in range(each.span, span_count(each.live.nbytes)):
            first, stop = number * SPAN_BYTES, min((number + 1) * SPAN_BYTES, each.live.nbytes)
            if source is not None:
                yield number, memory_of(source[first - base * SPAN_BYTES : stop - base * SPAN_BYTES])
                continue
            values = each.live.values(first // size, stop // size)
            yield number, memory_of(values if values.device.type == "cpu" else self._from_device(values))

    def _from_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copies values on a device to pinned memory, which the next copy overwrites."""
        pinned = self._pool.piece
        if pinned is None:
            pinned = self._pool.piece = pinned_zeros(SPAN_BYTES, self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            if self._taken is not None:
                # The values are those after the step that was submitted before the save.
                self._stream.wait_event(self._taken)
        piece = pinned[: values.nbytes].view(values.dtype)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            piece.copy_(values, non_blocking=True)
        self._stream.synchronize()  # the caller reads the piece, and the next step may replace the values
        return piece

    def _recorded(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _hand_over(self, index: int, part: _Part) -> bool:
        """Whether an update that waits for this chunk copies the rest of it, since there is room now."""
        with self._turn:
            self._refuse_given_up()
            if index not in self._wanted:
                return False
            part.rest = [each for each in part.read() if each.nbytes]
            if not part.rest:
                return False
            area = self._pool.take(part.rest_bytes)
            if area is None:
                return False
            part.area, part.handed_over = area, True
            part.to(PartState.COPYING)
            self._turn.notify_all()
            return True

    def _drop(self, part: _Part) -> None:
        if part.area is not None:
            if part.arrived is not None:
                part.arrived.synchronize()  # the device still copies into the area, which another save may get
            self._pool.give_back(part.area)
        part.area, part.rest, part.handed_over = None, [], False

    def wait_for_live(self) -> None:
        """Waits until nothing is read from live memory."""
        with self._turn:
            # The caller writes to chunks without asking one by one, such as a load or a move to another plan.
            self._turn.wait_for(lambda: all(part.state in (PartState.COPIED, PartState.DONE) for part in self._parts))

    def _give_up(self) -> None:
        """Gives up what is not written yet: updates go on, and the pool is free."""
        with self._turn:
            for part in self._parts:
                if part.state not in (PartState.DONE, PartState.COPYING, PartState.WRITING):
                    part.to(PartState.DONE)
                    self._drop(part)
            self._turn.notify_all()

    def end(self) -> None:
        """Ends the snapshot after its writer has ended, well or not: nothing is read any more."""
        with self._turn:
            # An updating thread still copies into areas of the pool, which are given back next.
            self._turn.wait_for(lambda: all(part.state is not PartState.COPYING for part in self._parts))
            for part in self._parts:
                if part.state is not PartState.DONE:
                    part.to(PartState.DONE)
                self._drop(part)
                vars(part).pop("states", None)  # a save that the caller keeps must not keep chunks, which may move
            vars(self).pop("_pool", None)  # nor memory for copies of a module that may be closed
            self._turn.notify_all()
