"""Host memory that no chunk owns: buffers through which data passes on its way, all of one rank under one owner.

Buffers are of a *kind*: some of one size for one purpose, which take turns. They are `Memory`: the work of a caller
that takes one comes after the last work that uses it.

    buffers.add(BufferKind("snapshot", "checkpoint", nbytes, count=2))
    buffer = buffers.take("snapshot", nbytes)
    lane.submit(copy, writes=[buffer])
    other_lane.submit(write, reads=[buffer])

So a slow lane holds up the work that fills its buffers, and nothing else. A kind is used by one thread at a time, but
for `HostBuffers.lend_inside`.

`HostMover` moves activations through them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from elixir.chunk.lanes import Lanes
from elixir.chunk.memory import Arena, Memory
from elixir.errors import StateError, readable_bytes
from elixir.plan.plan import FILE_BUFFERS, PASSAGE_BUFFERS, STAGING_BUFFERS, WINDOW_CHUNKS, Plan
from elixir.units import dtype_bytes

logger = logging.getLogger(__name__)

STAGING = "staging"
"""Kind: CPU Adam rounds new weights of low precision into one buffer, in the pass in which it steps their masters,
while those of the chunk before are copied to the device from the other. Copied from the masters they would be rounded
on the way: on CUDA by the thread that issues the copy, and in memory that is not pinned."""
SUMMANDS = "summands"
"""Kind: gradients from the device pass through here to be added to those of earlier backwards: one buffer is copied
into while the CPU-Adam thread adds the other."""

FILE_WINDOW = "weights from files"
"""Kind: weights that live in files pass through here: the disk lane reads a shard into one buffer while the one before
is copied to the device from the other."""
SWAPPED = "activations"
"""Kind: activations of units wait here for their backward, each storage in a part of the one buffer."""
WINDOW = "states from a disk"
"""Kind: masters and states that live on a disk are here while they are stepped, read ahead or written back
(`elixir.chunk.state_window`)."""
LARGEST_ALIGNMENT_BYTES = 16
"""Parts of a buffer begin at a multiple of the largest power of two that divides their size, up to this, which
suffices for every dtype."""
NOTICEABLE_GROWTH = 1.01
"""More than this times what a plan has of a kind is said."""


@dataclass(frozen=True)
class BufferKind:
    """Host buffers for one purpose.

    Attributes:
        name: of the purpose.
        counted_as: where the arena, and with it the plan, counts their bytes.
        buffer_bytes: size of each buffer. A request for more makes a buffer grow.
        count: how many buffers take turns.
        at_once: make them now rather than when each is first taken. To pin memory in the middle of a step holds up the
            device.
        pin: whether a device copies from and to them.
        paged: they begin at a page, as direct transfers of a disk want it.
    """

    name: str
    counted_as: str
    buffer_bytes: int
    count: int
    at_once: bool = True
    pin: bool = True
    paged: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together."""
        return self.buffer_bytes * self.count


class _Lent:
    """Parts of one buffer that are lent."""

    def __init__(self) -> None:
        self._inside: dict[int, tuple[int, int]] = {}  # by identity of the part: where it begins and ends
        self.separate: dict[int, Memory] = {}
        """Parts next to the buffer, likewise."""
        self.returned: deque[Memory] = deque()
        """Parts that nothing refers to any more. The garbage collector may return some at any moment."""
        self.most_bytes = 0
        """The most bytes that all parts took when some were next to the buffer."""
        self.has_grown = False
        self.lock = threading.Lock()
        """Protects this kind alone: who holds it may wait for lanes, and they for threads that borrow others' parts."""

    @property
    def nothing(self) -> bool:
        return not self._inside and not self.separate

    def taken_back(self) -> list[Memory]:
        """Forgets parts that were returned; those of them that lie next to the buffer."""
        found = []
        while self.returned:
            part = self.returned.popleft()
            self._inside.pop(id(part), None)
            if self.separate.pop(id(part), None) is not None:
                found.append(part)
        return found

    def room(self, nbytes: int, buffer_bytes: int) -> int | None:
        """The first byte for a new part, after all others or in a gap between them; None if there is no room.

        Backward returns parts in about the opposite order of forward, so that there are few gaps.
        """
        alignment = min(nbytes & -nbytes, LARGEST_ALIGNMENT_BYTES) or 1
        top = max((end for _, end in self._inside.values()), default=0)
        found = -(-top // alignment) * alignment
        if found + nbytes <= buffer_bytes:
            return found
        for (_, end), (begin, _) in pairwise([(0, 0), *sorted(self._inside.values())]):
            found = -(-end // alignment) * alignment
            if found + nbytes <= begin:
                return found
        return None

    def add(self, part: Memory, begin: int | None) -> None:
        """Enters a part, which lies next to the buffer if it begins nowhere."""
        if begin is not None:
            self._inside[id(part)] = begin, begin + part.tensor.nbytes
            return
        self.separate[id(part)] = part
        needed = sum(each.tensor.nbytes + LARGEST_ALIGNMENT_BYTES for each in self.separate.values())
        self.most_bytes = max(self.most_bytes, needed + max((end for _, end in self._inside.values()), default=0))


class HostBuffers:
    """All such buffers of one rank.

    Args:
        arena: makes and counts the memory.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._kinds: dict[str, BufferKind] = {}
        self._turns: dict[str, deque[Memory]] = {}  # by kind; the next one first
        self._lent: dict[str, _Lent] = {}  # by kind

    def add(self, kind: BufferKind) -> None:
        """Takes up a kind.

        Raises:
            StateError: there is one of that name.
        """
        if kind.name in self._kinds:
            raise StateError(f"host buffers of the kind '{kind.name}' are there already")
        self._kinds[kind.name] = kind
        self._turns[kind.name] = deque(Memory(count=self._arena.count, kind=kind.counted_as) for _ in range(kind.count))
        self._lent[kind.name] = _Lent()
        for buffer in self._turns[kind.name] if kind.at_once else ():
            self._make_room(kind, buffer, kind.buffer_bytes)

    def replace(self, kind: BufferKind) -> None:
        """Takes up a kind instead of one of that name, if there is one, whose buffers nothing may read or write."""
        self.drop(kind.name)
        self.add(kind)

    def drop(self, name: str) -> None:
        """Gives up a kind, if it exists, after the last read or write of its buffers."""
        kind = self._kinds.pop(name, None)
        if kind is None:
            return
        buffers = self.of(name)
        del self._turns[name], self._lent[name]
        for buffer in buffers:
            buffer.settle()  # a lane may still use the memory that is given up
            buffer.free()

    def clear(self) -> None:
        """Gives up all kinds."""
        for name in list(self._kinds):
            self.drop(name)

    def count_in(self, arena: Arena) -> None:
        """Makes and counts the memory in another arena from here on, as under another plan."""
        self._arena = arena
        for kind in self._kinds.values():
            for buffer in self.of(kind.name):
                buffer.count_by(arena.count)

    def take(self, name: str, nbytes: int) -> Memory:
        """Takes the buffer of a kind whose turn it is, with room for `nbytes`."""
        kind, turns = self._kinds[name], self._turns[name]
        buffer = turns[0]
        turns.rotate(-1)
        self._make_room(kind, buffer, max(nbytes, kind.buffer_bytes))
        return buffer

    def lend(self, name: str, nbytes: int) -> Memory:
        """Lends a part of the one buffer of a kind, until `give_back`; if that has no room, memory next to it.

        As long as no more is lent at once than the kind is for, whatever the sizes, there is no other memory. What was
        next to the buffer is in it as soon as nothing is lent.
        """
        part = self.lend_inside(name, nbytes)
        if part is None:
            part = self._made(self._kinds[name], nbytes)
            self._lent[name].add(part, None)
        return part

    def lend_inside(self, name: str, nbytes: int) -> Memory | None:
        """Lends a part of the one buffer of a kind, until `give_back`, to any thread; None if that has no room."""
        with self._lent[name].lock:
            return self._lend_inside(name, nbytes)

    def _lend_inside(self, name: str, nbytes: int) -> Memory | None:
        kind, whole, lent = self._kinds[name], self._turns[name][0], self._lent[name]
        for extra in lent.taken_back():
            extra.settle()  # a lane may still use the memory
            extra.free()
        most = max(kind.buffer_bytes, lent.most_bytes)
        if lent.nothing:
            if most > kind.buffer_bytes * NOTICEABLE_GROWTH and not lent.has_grown:
                lent.has_grown = True
                logger.warning(
                    "%s take %s of host memory, for which the plan has %s: a batch is larger than the one that was "
                    "traced; plan for the largest (inp=)",
                    kind.counted_as.replace("_", " "),
                    readable_bytes(most),
                    readable_bytes(kind.buffer_bytes),
                )
            self._make_room(kind, whole, most)
        begin = lent.room(nbytes, whole.tensor.nbytes)
        if begin is None:
            return None
        part = whole.part(begin, nbytes)
        lent.add(part, begin)
        return part

    def give_back(self, name: str, part: Memory) -> None:
        """Takes back a part that was lent, by any thread and at any moment."""
        if name in self._lent:
            self._lent[name].returned.append(part)

    def of(self, name: str) -> list[Memory]:
        """All buffers of a kind."""
        return [*self._turns[name], *self._lent[name].separate.values()]

    def _make_room(self, kind: BufferKind, buffer: Memory, nbytes: int) -> None:
        if buffer.tensor.nbytes < nbytes:
            buffer.settle()  # a lane may still use the memory that is given up
            buffer.free()  # before there is another, so that there are never both
            buffer.tensor = self._made(kind, nbytes).tensor

    def enlarge(self, name: str, buffer: Memory, nbytes: int) -> None:
        """Gives a buffer of a kind more memory, with what it holds; nothing may be at work on it."""
        before = buffer.tensor
        if before.nbytes < nbytes:
            made = self._made(self._kinds[name], nbytes).tensor
            made[: before.nbytes].copy_(before)
            buffer.free()
            buffer.tensor = made

    def _made(self, kind: BufferKind, nbytes: int) -> Memory:
        return self._arena.make(nbytes, torch.uint8, "host", kind.counted_as, pin=kind.pin, paged=kind.paged)


def swapped_kind(plan: Plan) -> BufferKind:
    """The buffer for activations that move to the host, made when the first of them does."""
    return BufferKind(SWAPPED, "swapped_activations", plan.step.swap_bytes, 1, at_once=False)


def staging_kind(plan: Plan) -> BufferKind:
    """Buffers for the new weights of chunks that return to the device in fewer bits."""
    sizes = [chunk.weight_bytes // plan.shards for chunk in plan.chunks if chunk.returns_rounded]
    return BufferKind(STAGING, "staging", max(sizes, default=0), min(len(sizes), STAGING_BUFFERS))


def file_window_kind(plan: Plan) -> BufferKind:
    """Buffers for weights that live in files."""
    sizes = [chunk.weight_bytes // plan.shards for chunk in plan.chunks if chunk.weight_home == "files"]
    return BufferKind(FILE_WINDOW, "file_window", max(sizes, default=0), min(len(sizes), FILE_BUFFERS))


def window_kind(plan: Plan) -> BufferKind:
    """Buffers for masters and states that live on a disk."""
    chunks = [chunk for chunk in plan.chunks if chunk.state_home == "disk"]
    largest = max((plan.extent_bytes(chunk) for chunk in chunks), default=0)
    # A device copies from masters only where weights are no narrower; all others are rounded elsewhere.
    copied = any(chunk.weight_home == "device" and not chunk.returns_rounded for chunk in chunks)
    return BufferKind(WINDOW, "state_window", largest, min(len(chunks), WINDOW_CHUNKS), pin=copied, paged=True)


def summands_kind(plan: Plan, device_type: str, *, backwards: int, wide: bool = False) -> BufferKind:
    """Buffers for gradients that the host adds up, there from the beginning where the plan foresees them.

    Args:
        plan: says which chunks' gradients the host holds.
        device_type: gradients of a CPU are added without a buffer.
        backwards: of a step.
        wide: gradients arrive in float32, whatever the dtype of the weights.
    """
    sizes = [
        chunk.numel // plan.shards * (torch.float32.itemsize if wide else dtype_bytes(chunk.dtype))
        for chunk in plan.chunks
        if chunk.trainable and chunk.update_home == "host" and chunk.reduce_order is not None
    ]
    count = max(min(len(sizes), PASSAGE_BUFFERS), 1)  # one for what no plan foresees
    at_once = backwards > 1 and device_type != "cpu"
    return BufferKind(SUMMANDS, "gradients", max(sizes, default=0), count, at_once)


# --- host mover ------------------------------------------------------------------------------------------------------
# `HostMover`: copies activations to pinned host memory and back, on the lanes of gradients and weights.
#
# Out they go on `offload`, back on `fetch`: each direction of the link has one order, so that a copy of activations
# never overtakes weights or gradients that were asked for before, nor holds up those that it comes after. The simulator
# replays the same order (`elixir.search.simulator.replay`).


class HostMover:
    """Moves flat tensors of one rank.

    Args:
        lanes: make the copies.
        buffers: hold what is on the host.
    """

    def __init__(self, lanes: Lanes, buffers: HostBuffers) -> None:
        self._lanes, self.buffers = lanes, buffers

    def send(self, tensor: torch.Tensor) -> SentTensor:
        """Begins to copy a flat tensor to the host. It must not be written to before `SentTensor.arrived`."""
        self._lanes.counts.device_to_host_bytes += tensor.nbytes
        return SentTensor(self, self._lanes, tensor)


class SentTensor:
    """A flat tensor that moves to the host; its buffer is free when nothing refers to this."""

    def __init__(self, mover: HostMover, lanes: Lanes, tensor: torch.Tensor) -> None:
        self._mover, self._lanes = mover, lanes
        self._numel, self._dtype, self._device = tensor.numel(), tensor.dtype, tensor.device
        self._buffer = buffer = mover.buffers.lend(SWAPPED, tensor.nbytes)
        host = buffer.view(self._numel, self._dtype)
        # The caller holds the tensor, and with it the device's memory, until `arrived`.
        work = partial(host.copy_, tensor, non_blocking=True)
        lanes.offload.submit(work, writes=[buffer], nbytes=tensor.nbytes)
        self._here: Memory | None = None

    def arrived(self) -> None:
        """Lets compute wait until it is on the host."""
        self._buffer.wait()  # compute that is submitted next may get the memory that the copy reads

    def fetch(self) -> None:
        """Begins to bring it back, unless it is on the device."""
        if self._here is None:
            self._here = self._begun()

    def tensor(self) -> torch.Tensor:
        """The tensor on the device; compute waits until it is there."""
        here = self._here = self._begun() if self._here is None else self._here
        here.wait(taking=True)  # compute reads what the copy writes
        return here.tensor

    def _begun(self) -> Memory:
        here = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        memory, host = Memory(here), self._buffer.view(self._numel, self._dtype)
        self._lanes.counts.host_to_device_bytes += here.nbytes
        work = partial(here.copy_, host, non_blocking=True)
        self._lanes.fetch.submit(work, reads=[self._buffer], writes=[memory], nbytes=here.nbytes)
        return memory

    def forget(self) -> None:
        """Lets go of the device memory, until the tensor is asked for again."""
        if self._here is not None:
            self._here.wait(taking=True)  # the device gets memory back that the copy may still write to
            self._here = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # of work that failed, which was reported where it was waited for
            self.forget()
        self._mover.buffers.give_back(SWAPPED, self._buffer)
