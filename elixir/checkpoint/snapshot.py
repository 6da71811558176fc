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
from typing import NamedTuple, Protocol

import torch

from elixir.checkpoint_format.saved_tensor import SPAN_BYTES, Part, memory_of, span_count
from elixir.chunk.host_buffers import BufferKind, HostBuffers
from elixir.chunk.memory import Memory
from elixir.chunk.pages import pinned_zeros
from elixir.errors import CheckpointError, StateError
from elixir.hardware.process_memory import give_back_freed
from elixir.plan.prediction import CHECKPOINT_PART

WriteSpan = Callable[[str, int, memoryview], None]
"""Takes (key, number of the span, bytes)."""

COPIES = "copies for a checkpoint"
"""Kind of host buffers: states that are about to change are copied there, if they are not written yet."""
ALIGNMENT_BYTES = 64
"""Alignment of every copy, and of every tensor in one: a cache line, and a multiple of every element."""


def aligned(nbytes: int) -> int:
    """Bytes that a copy takes."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Copies(NamedTuple):
    """Memory for copies, which the saves of a module share."""

    buffers: HostBuffers
    kind: BufferKind
    """The one buffer for copies, made when the first is."""
    pinned: dict[torch.device, torch.Tensor]
    """By device, memory through which the writer reads it. The next save uses it again, because pinning and freeing
    make the driver wait for the device."""

    @staticmethod
    def of(buffers: HostBuffers, limit_bytes: int) -> Copies:
        """Gives up the kind that there is, for one of another size; 0 bytes have no room: updates wait for the disk."""
        kind = BufferKind(COPIES, CHECKPOINT_PART, limit_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES, 1, at_once=False)
        buffers.replace(kind)
        return Copies(buffers, kind, {})


class LiveStates(Protocol):
    """The live tensors of one chunk that are saved."""

    def read(self) -> list[Part]:
        """Waits for the update that was under way when the snapshot was taken, raises what it raised, and returns what
        is saved; called once, before anything changes."""

    def check(self) -> None:
        """Raises if anything has changed unannounced since the snapshot was taken."""


class PartState(enum.Enum):
    """How far the writer is with a chunk, and who holds the bytes that are still to be written."""

    LIVE = "live"
    """Memory of the chunk holds the bytes; nobody reads it now."""
    WRITING = "writing"
    """Memory of the chunk holds the bytes, and the writer reads it."""
    HANDED = "handed over"
    """Memory of the chunk holds the bytes. An update that waits copies them next; it has room for them."""
    COPYING = "copying"
    """An update copies the bytes."""
    COPIED = "copied"
    """A host buffer holds the bytes."""
    DONE = "done"
    """All bytes are written, or nobody wants them any more."""


_ALLOWED = {
    PartState.LIVE: (PartState.WRITING, PartState.COPYING, PartState.DONE),
    PartState.WRITING: (PartState.HANDED, PartState.DONE),
    PartState.HANDED: (PartState.COPYING, PartState.DONE),
    PartState.COPYING: (PartState.COPIED, PartState.DONE),
    PartState.COPIED: (PartState.DONE,),
    PartState.DONE: (),
}


@dataclass
class _Rest:
    """The part of one tensor that is left to write."""

    part: Part
    span: int = 0
    """Number of the next span."""
    copied: torch.Tensor | None = None
    """Bytes from that span on, in a host buffer."""

    @property
    def nbytes(self) -> int:
        return max(0, self.part.nbytes - self.span * SPAN_BYTES)


class _Chunk:
    """One chunk."""

    def __init__(self, states: LiveStates) -> None:
        self.states = states
        self.state = PartState.LIVE
        self.rest: list[_Rest] | None = None
        """The tensors that are left; None until it was read for the first time."""
        self.area: Memory | None = None
        """Room for a copy."""
        self.arrived: torch.cuda.Event | None = None
        """Event after the copies, if they come from a device."""
        self.lock = threading.Lock()

    def to(self, state: PartState) -> None:
        if state not in _ALLOWED[self.state]:
            raise StateError(f"a chunk of a snapshot cannot go from {self.state.value} to {state.value}")
        self.state = state

    def read(self) -> list[_Rest]:
        """Returns the data to write, read once: by the writer, or by the first update after the snapshot."""
        with self.lock:
            if self.rest is None:
                self.rest = [_Rest(part) for part in self.states.read()]
            self.rest = [each for each in self.rest if each.nbytes]
            return self.rest


class Snapshot:
    """States of one step, on their way to a file.

    Args:
        chunks: in the order in which they are updated next.
        copies: memory for copies.
        device: where compute runs.
    """

    def __init__(self, chunks: Sequence[LiveStates], copies: Copies, device: torch.device) -> None:
        self._chunks = [_Chunk(states) for states in chunks]
        self._copies, self._device = copies, device
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
        chunk, copies = self._chunks[index], False
        started = time.perf_counter()
        try:
            with self._turn:
                self._begun = True
                if chunk.state is PartState.DONE:
                    return
            chunk.read()
            with self._turn:
                if chunk.state is not PartState.LIVE or not self._has_room(chunk):
                    self._wanted.append(index)
                    # The writer, or another update, reads this chunk's live memory, which the caller is about to
                    # change.
                    over = (PartState.DONE, PartState.COPIED, PartState.HANDED)
                    self._turn.wait_for(lambda: chunk.state in over)
                    if chunk.state is not PartState.HANDED:
                        return
                chunk.to(PartState.COPYING)
                copies = True
            self._copy(chunk)
        except BaseException as error:
            # The update must go on, and a checkpoint of half a chunk is none.
            self._give_up(error, chunk if copies else None)
            if not isinstance(error, Exception):  # such as an interrupt, which is for the caller
                raise
        finally:
            with self._turn:  # the CPU-Adam thread and the thread of the device's steps both add to it
                self.stall_s += time.perf_counter() - started

    def _has_room(self, chunk: _Chunk) -> bool:
        """Whether there is room for a copy of what is left of a chunk, which it then has."""
        buffers, limit_bytes = self._copies.buffers, self._copies.kind.buffer_bytes
        nbytes = sum(aligned(each.nbytes) for each in chunk.rest or ())
        if nbytes > limit_bytes or not limit_bytes:
            return False
        if not buffers.of(COPIES)[0].tensor.nbytes:
            give_back_freed()  # of the last step
        chunk.area = buffers.lend_inside(COPIES, nbytes)
        return chunk.area is not None

    def _copy(self, chunk: _Chunk) -> None:
        at, by_device = 0, False
        assert chunk.area is not None
        for each in chunk.rest or ():
            size = each.part.dtype.itemsize
            each.copied = chunk.area.tensor[at : at + each.nbytes]
            values = each.part.values(each.span * SPAN_BYTES // size, each.part.numel)
            by_device |= values.is_cuda
            # On a device this is queued after compute, and before the step that replaces the values.
            each.copied.view(each.part.dtype).copy_(values, non_blocking=True)
            at += aligned(each.nbytes)
        chunk.states.check()
        self.copied_bytes += at
        # Copies from host memory are there by now: an event would only have the writer wait for compute.
        arrived = self._recorded() if by_device else None
        with self._turn:
            chunk.arrived = arrived
            chunk.to(PartState.COPIED)
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
            self._write_chunk(index, write_span, heartbeat)

    def _next(self) -> int | None:
        """Chooses the chunk to write now: one that an update waits for, then live ones, then copies. None: all are
        written."""
        with self._turn:
            while True:
                self._refuse_given_up()
                live = [i for i, chunk in enumerate(self._chunks) if chunk.state is PartState.LIVE]
                copied = [i for i, chunk in enumerate(self._chunks) if chunk.state is PartState.COPIED]
                waiting = [i for i in self._wanted if i in live]
                found = waiting or (live[::-1] if self._begun else live) or copied
                if found:
                    if live:
                        self._chunks[found[0]].to(PartState.WRITING)
                    return found[0]
                if all(chunk.state is PartState.DONE for chunk in self._chunks):
                    return None
                self._turn.wait()  # until the last copy is made

    def _refuse_given_up(self) -> None:
        if self._given_up is not None:
            raise CheckpointError(f"the states of a step could not be read: {self._given_up}") from self._given_up

    def _write_chunk(self, index: int, write_span: WriteSpan, heartbeat: Callable[[], None]) -> None:
        chunk = self._chunks[index]
        copied = chunk.state is PartState.COPIED
        if copied and chunk.arrived is not None:
            chunk.arrived.synchronize()  # the device makes the copies
        for each in chunk.read():
            for number, data in self._spans(each):
                write_span(each.part.key, number, data)
                each.span = number + 1
                del data
                heartbeat()
                if not copied and self._hand_over(index):
                    return
        if not copied:
            chunk.states.check()
        with self._turn:
            self._refuse_given_up()
            self._finish(chunk)

    def _hand_over(self, index: int) -> bool:
        """Whether an update that waits for this chunk copies the rest of it, since there is room now."""
        chunk = self._chunks[index]
        with self._turn:
            self._refuse_given_up()
            if index not in self._wanted or not chunk.read() or not self._has_room(chunk):
                return False
            chunk.to(PartState.HANDED)
            self._turn.notify_all()
            return True

    def _spans(self, each: _Rest) -> Iterator[tuple[int, memoryview]]:
        """Yields the spans that are left of one tensor; the bytes stay as they are until the next span is asked for."""
        size, base = each.part.dtype.itemsize, each.span * SPAN_BYTES
        for number in range(each.span, span_count(each.part.nbytes)):
            first, stop = number * SPAN_BYTES, min((number + 1) * SPAN_BYTES, each.part.nbytes)
            if each.copied is not None:
                values = each.copied[first - base : stop - base]
            else:
                values = each.part.values(first // size, stop // size)
            yield number, memory_of(values if values.device.type == "cpu" else self._from_device(values))

    def _from_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copies values on a device to pinned memory, which the next copy overwrites."""
        pinned = self._copies.pinned
        if self._device not in pinned:
            pinned[self._device] = pinned_zeros(SPAN_BYTES, self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            if self._taken is not None:
                # The values are those after the step that was submitted before the save.
                self._stream.wait_event(self._taken)
        piece = pinned[self._device][: values.nbytes].view(values.dtype)
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

    def _finish(self, chunk: _Chunk) -> None:
        """Ends with a chunk and frees its copy; called in turn."""
        if chunk.state is not PartState.DONE:
            chunk.to(PartState.DONE)
        if chunk.area is not None:
            if chunk.arrived is not None:
                chunk.arrived.synchronize()  # the device still copies into the area, which another save may get
            self._copies.buffers.give_back(COPIES, chunk.area)
        chunk.area, chunk.rest = None, []
        self._turn.notify_all()

    def _give_up(self, error: BaseException, copying: _Chunk | None) -> None:
        """Gives up what is not written yet, since an update could not be held up: updates go on.

        Args:
            error: of the update.
            copying: the chunk that it was copying.
        """
        with self._turn:
            self._given_up = self._given_up or error  # before the writer finds nothing left to write
            if copying is not None and self._device.type == "cuda":
                # What was queued still fills the area, which another save may get.
                torch.cuda.current_stream(self._device).synchronize()
            for chunk in self._chunks:
                busy = chunk.state in (PartState.COPYING, PartState.WRITING)
                if chunk is copying or not busy:
                    self._finish(chunk)
            self._turn.notify_all()

    def wait_for_live(self) -> None:
        """Waits until nothing is read from live memory."""
        with self._turn:
            # The caller writes to chunks without asking one by one, such as a load or a move to another plan.
            over = (PartState.COPIED, PartState.DONE)
            self._turn.wait_for(lambda: all(chunk.state in over for chunk in self._chunks))

    def end(self) -> None:
        """Ends the snapshot after its writer has ended, well or not: nothing is read any more."""
        with self._turn:
            # An updating thread still copies into areas, which are given back next.
            self._turn.wait_for(lambda: all(chunk.state is not PartState.COPYING for chunk in self._chunks))
            for chunk in self._chunks:
                self._finish(chunk)
                vars(chunk).pop("states", None)  # a save that the caller keeps must not keep chunks, which may move
            vars(self).pop("_copies", None)  # nor memory for copies of a module that may be closed
