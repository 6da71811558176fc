"""Master weights and optimizer states that live on a disk, and the few host buffers through which they pass.

All of a chunk's masters and states are one extent of a file. In memory they are only while a buffer of the *window*
holds the extent: then the tensors that the optimizer steps are views of that buffer. At other times they have their
shape and dtype, and no memory: a read gives NaN, a write raises.

A step of a chunk is a chain of three: the disk lane reads the extent into a buffer, the CPU-Adam lane steps it there,
the disk lane writes it back. The lane reads as far ahead as there are buffers: read 0, read 1, read 2, write 0, read 3,
write 1, ... Whatever else looks at masters or states does so inside of `StoredStates.at_hand`.

An optimizer's class that makes its states itself makes them in separate memory. A chunk whose states are made so is
*alone*: the window gives up all buffers but one, which has room for the masters only, and the states are written to
the extent through that. So the masters and the new states together take no more memory than the window has. The
exception is the only chunk on a disk if its states come in parts, as those of a second optimizer or of a weight whose
first gradient is late: then the new part lies next to a buffer for all, for that one step.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from errno import EIO

import torch

from elixir.chunk.buffers import Arena
from elixir.chunk.host_buffers import WINDOW, HostBuffer, HostBuffers
from elixir.chunk.lanes import Lane, Ticket, Work, failure, known, over
from elixir.chunk.pinned import host_zeros
from elixir.errors import DiskError, FileError, StateError
from elixir.extents import Extent, ExtentFile, whole_blocks
from elixir.files import DIRECT_BYTES

logger = logging.getLogger(__name__)

MASTERS = "masters"
"""The first region of every extent."""


@dataclass(frozen=True)
class _Region:
    """A part of an extent: one flat tensor."""

    start: int
    """First byte in the extent."""
    numel: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class _View:
    """A tensor that lies in a region while the extent is in memory."""

    tensor: torch.Tensor
    region: str
    first: int
    """Its first element in the region."""
    owner: object
    apart: bool = False
    """Whether it has separate memory until the extent is written, as the buffer has no room for the region."""


class StoredStates:
    """Masters and states of one chunk, on a disk.

    Args:
        window: whose buffers they pass through.
        name: of the chunk, for errors.
        nbytes: size of the extent that a plan foresees; one that needs more gets a larger one.
    """

    def __init__(self, window: StateWindow, name: str, nbytes: int) -> None:
        self.name = name
        self._window = window
        self._extent = window.new_extent(nbytes, name)
        self._written_bytes = 0
        """From here on the extent has zeros."""
        self._regions: dict[str, _Region] = {}
        self._views: list[_View] = []
        self._buffer: HostBuffer | None = None
        self._depth = 0
        self._changed = False
        self._begun = False
        """Whether the extent is being written, so that a failure leaves neither the old states nor the new."""
        self.written: Ticket | None = None
        """The last write of the extent."""

    @property
    def nbytes(self) -> int:
        """Bytes of the extent."""
        return self._extent.nbytes

    @property
    def has_room_for_states(self) -> bool:
        """Whether a plan foresees more than masters."""
        return self.nbytes > whole_blocks(self._regions[MASTERS].end)

    @property
    def used_bytes(self) -> int:
        """Bytes that a transfer of all regions moves."""
        return whole_blocks(max((region.end for region in self._regions.values()), default=0))

    # --- regions and the tensors in them ---------------------------------------------------------------------------

    def region(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of the extent, zero if it is new; a view of the buffer, if one holds the extent.

        Args:
            name: of the region.
            numel: its elements.
            dtype: of each; a region that is there has the same.
        """
        if name not in self._regions:
            end = max((region.end for region in self._regions.values()), default=0)
            start = -(-end // dtype.itemsize) * dtype.itemsize
            self._regions[name] = found = _Region(start, numel, dtype)
            if found.end > self.nbytes:
                self._grow(found.end)
            if self._buffer is not None:
                self._buffer.memory[found.start : found.end].zero_()
                self._changed |= start < self._written_bytes
        region = self._regions[name]
        if (region.numel, region.dtype) != (numel, dtype):
            raise StateError(f"{self.name}: '{name}' has {region.numel} x {region.dtype}, asked for {numel} x {dtype}")
        return self._memory_of(region) if self._has_room(region) else _nowhere((numel,), dtype)

    def has(self, name: str) -> bool:
        """Whether there is a region of that name."""
        return name in self._regions

    def keep(self, owner: object, tensor: torch.Tensor, name: str, first: int = 0) -> None:
        """Have a tensor lie in a region whenever the extent is in memory, with the values that it has now; call this
        while it is.

        Args:
            owner: for `forget`.
            tensor: a contiguous one.
            name: of the region.
            first: its first element there.
        """
        if self._buffer is not None and not self._has_room(self._regions[name]):
            self._views.append(_View(tensor, name, first, owner, apart=True))
            self._changed = True
            return
        place = self._memory_of(self._regions[name])[first : first + tensor.numel()].view(tensor.shape)
        if place.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                place.copy_(tensor.detach())
            self._changed = True
        self.show(owner, tensor, name, first)

    def show(self, owner: object, tensor: torch.Tensor, name: str, first: int = 0) -> None:
        """Have a tensor show a part of a region whenever the extent is in memory; arguments as of `keep`."""
        self._views.append(_View(tensor, name, first, owner))
        if self._buffer is None:
            tensor.data = _nowhere(tensor.shape, tensor.dtype)
        else:
            tensor.data = self._part(self._views[-1])

    def _part(self, view: _View) -> torch.Tensor:
        memory = self._memory_of(self._regions[view.region])
        return memory[view.first : view.first + view.tensor.numel()].view(view.tensor.shape)

    def _has_room(self, region: _Region) -> bool:
        return self._buffer is not None and region.end <= self._buffer.memory.nbytes

    def forget(self, owner: object) -> None:
        """The tensors of an owner lie here no more."""
        self._views = [view for view in self._views if view.owner is not owner]

    def _memory_of(self, region: _Region) -> torch.Tensor:
        if self._buffer is None:
            raise StateError(f"the states of {self.name} are on the disk and not in memory")
        return self._buffer.memory[region.start : region.end].view(region.dtype)

    def _bind(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        for view in self._views:
            view.tensor.data = self._part(view)

    def _unbind(self) -> None:
        self._buffer = None
        for view in self._views:
            view.tensor.data = _nowhere(view.tensor.shape, view.tensor.dtype)
        self._views = [replace(view, apart=False) if view.apart else view for view in self._views]

    def _grow(self, nbytes: int) -> None:
        """States that no plan has foreseen: a larger extent, and as much room in the buffer."""
        if self._buffer is None:
            raise StateError(f"the extent of {self.name} can grow only while it is in memory")
        alone = self._buffer.memory.nbytes < self.nbytes
        self._window.give_back(self._extent)
        self._extent = self._window.new_extent(nbytes, self.name)
        self._written_bytes = self.nbytes  # what another chunk had there may be there still
        self._changed = True
        if not alone:
            self._window.enlarge(self._buffer, self.nbytes)
            self._bind(self._buffer)

    # --- transfers -------------------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes that reading all of them moves: what was never written is zero."""
        return min(self.used_bytes, self._written_bytes)

    def fill(self, buffer: HostBuffer) -> None:
        """Read the extent into a buffer."""
        self._refuse_begun()
        kept, used = self.kept_bytes, self.used_bytes
        if kept:
            self._window.transfer("read", self._extent, buffer.memory[:kept], self.name)
        buffer.memory[kept:used].zero_()

    def step(self, buffer: HostBuffer, read: Ticket, work: Work) -> None:
        """Run `work` while the tensors are views of a buffer into which they were `read`; `store` or `put_away` comes
        next. Nothing happens where the reading has failed, of which `StateWindow.lost` tells."""
        if not over(read).failed:
            self._bind(buffer)
            work()

    @staticmethod
    def if_read(read: Ticket, work: Work) -> None:
        """Run `work` unless the reading has failed."""
        if not over(read).failed:
            work()

    def store(self, buffer: HostBuffer) -> None:
        """Write what a step has left in the buffer to the extent."""
        used = self.used_bytes
        try:
            self._begun = True
            for first in range(0, used, buffer.memory.nbytes):
                part = buffer.memory[: used - first]
                self._bring_together(part, first)
                self._window.transfer("write", self._extent, part, self.name, first)
            self._begun = self._changed = False
        finally:
            self._unbind()
        self._written_bytes = max(self._written_bytes, used)

    def _bring_together(self, part: torch.Tensor, first: int) -> None:
        """Have a part of the extent, from the byte `first` on, in memory that holds its beginning: what is there
        already, or lies in tensors that are apart, and else zeros."""
        if first:
            part.zero_()
        for view in self._views:
            if view.apart:
                at = self._regions[view.region].start + view.first * view.tensor.itemsize - first
                values = view.tensor.detach().reshape(-1).view(torch.uint8)
                begin, end = max(at, 0), min(at + values.numel(), part.numel())
                if begin < end:
                    part[begin:end].copy_(values[begin - at : end - at])

    def forget_failure(self) -> None:
        """Somebody has been told why the last step was not written; who reads the extent gets the step before."""
        if failure(self.written) is not None:
            self.written = None

    def put_away(self) -> None:
        """A step has failed: the extent stays as it was."""
        self._unbind()

    @contextlib.contextmanager
    def at_hand(self, write: bool = False, *, alone: bool = False) -> Iterator[None]:
        """Have masters and states in memory for as long as this lasts; inside of another one, nothing is moved.

        Args:
            write: they are changed, so they are written back at the end.
            alone: states are made that are kept in the extent afterwards.

        Raises:
            DiskError: the disk has failed, now or before.
        """
        if not self._depth:
            self._window.bring_in(self, alone=alone)
        self._depth += 1
        self._changed |= write
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._window.done_with(self)

    @property
    def is_at_hand(self) -> bool:
        """Whether code looks at them now."""
        return bool(self._depth)

    def brought(self, buffer: HostBuffer | None) -> None:
        """They are in a buffer, or, with None, in none any more; for the window."""
        if buffer is None:
            self._unbind()
        else:
            self._bind(buffer)

    def take_changed(self) -> bool:
        """Whether the buffer has other values than the extent; once told, it counts as written."""
        changed, self._changed = self._changed, False
        return changed

    def read(self, name: str, first: int, stop: int) -> torch.Tensor:
        """Elements of a region in separate memory, straight from the disk: for a reader that takes no turn.

        Nothing may write the extent meanwhile.
        """
        self._refuse_begun()
        region = self._regions[name]
        size = region.dtype.itemsize
        begin, end = region.start + first * size, region.start + stop * size
        aligned = begin // DIRECT_BYTES * DIRECT_BYTES
        memory = host_zeros(whole_blocks(end - aligned))
        self._window.transfer("read", self._extent, memory, self.name, aligned)
        return memory[begin - aligned : end - aligned].view(region.dtype)

    def give_back(self) -> None:
        """Nobody needs the extent any more."""
        self._views.clear()
        self._window.give_back(self._extent)

    def _refuse_begun(self) -> None:
        """Raise where a write of the extent has failed, so that nobody reads a part of it for the whole."""
        if self._begun and self._window.lost is not None:
            raise self._window.lost


class StateWindow:
    """The buffers, the lane and the file through which states on a disk come and go, of one rank.

    Args:
        lane: of the disk.
        buffers: have the kind `WINDOW`.
        open_file: makes the file when the first extent is asked for, given the bytes that will be in it.
    """

    def __init__(self, lane: Lane, buffers: HostBuffers, open_file: Callable[[int], ExtentFile]) -> None:
        self._lane, self._buffers, self._open = lane, buffers, open_file
        self._file: ExtentFile | None = None
        self._arena: Arena | None = None
        self._extents_bytes = self._expected_bytes = 0
        self._waiting: deque[tuple[StoredStates, HostBuffer, Ticket]] = deque()
        """Steps whose write has not been given to the lane: reads of what comes next go first."""
        self._keeping = False
        self._held: tuple[StoredStates, HostBuffer] | None = None
        """The extent that is at hand, or was the last."""
        self.lost: DiskError | None = None
        """The first error of the disk, after which no step is made."""
        self.read_bytes = self.written_bytes = 0
        """Bytes that steps have moved since `take_moved`."""

    # --- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, states: StoredStates, *, alone: bool = False) -> tuple[HostBuffer, Ticket]:
        """A buffer for the step of a chunk, and the reading of its states into it; `alone` if the step makes states."""
        self._let_go()
        count = len(self._buffers.of(WINDOW))
        while len(self._waiting) >= count or any(each is states for each, _, _ in self._waiting):
            self._write_next()
        buffer = self._take_alone(states) if alone else self._buffers.take(WINDOW, states.nbytes)
        nbytes = states.kept_bytes
        # The states that the buffer held last must be on the disk, and those that are read now, too; of what could not
        # be written `fill` knows.
        after = [over(ticket) for ticket in (*buffer.tickets, *known(states.written))]
        read = self._lane.submit(lambda: states.fill(buffer), after=after, nbytes=nbytes)
        buffer.busy = read
        self.read_bytes += nbytes
        return buffer, read

    def end_step(self, states: StoredStates, buffer: HostBuffer, stepped: Ticket, *, alone: bool = False) -> None:
        """Have the states written back once `stepped` is over, after the readings of the steps that come next; none
        come before that if the chunk is `alone`."""
        self._waiting.append((states, buffer, stepped))
        if alone:
            self.settle()

    def flush(self) -> None:
        """No step comes next: have all states written back."""
        while self._waiting:
            self._write_next()

    def _write_next(self) -> None:
        states, buffer, stepped = self._waiting.popleft()
        nbytes = states.used_bytes

        def write() -> None:
            error = self.lost or failure(stepped)
            if error is not None:
                states.put_away()
                raise error  # a save that waits for these states must not take those of the step before for them
            states.store(buffer)

        # The step fills the buffer. If it fails, the states on the disk stay, and the buffer is free all the same.
        states.written = self._lane.submit(write, after=[over(stepped)], nbytes=nbytes)
        buffer.busy = over(states.written)
        self.written_bytes += nbytes

    def settle(self) -> None:
        """Wait until all states are back on the disk, or cannot be: see `lost`."""
        self.flush()
        # Buffers and extents may be read or written by anybody after this.
        failure(self._lane.submit(lambda: None))

    def take_moved(self) -> tuple[int, int]:
        """(read, written) bytes of steps since this was last asked."""
        moved = self.read_bytes, self.written_bytes
        self.read_bytes = self.written_bytes = 0
        return moved

    # --- between steps ---------------------------------------------------------------------------------------------

    def bring_in(self, states: StoredStates, *, alone: bool = False) -> None:
        """Have states in memory; returns when they are there."""
        if self._held is not None and self._held[0] is states:
            return
        self._let_go()
        self.flush()
        buffer = self._take_alone(states) if alone else self._buffers.take(WINDOW, states.nbytes)
        # Nothing may write the buffer or the extent any more; what failed there has been told.
        after = [over(ticket) for ticket in known(buffer.busy, states.written)]
        # The caller reads the buffer next.
        self._lane.submit(lambda: states.fill(buffer), after=after, nbytes=states.used_bytes).synchronize()
        buffer.busy = None
        states.brought(buffer)
        self._held = (states, buffer)

    def _take_alone(self, states: StoredStates) -> HostBuffer:
        """The only buffer that there is, with room for what has been written of the states."""
        self.settle()  # what others have in their buffers goes back first
        return self._buffers.take_alone(WINDOW, states.used_bytes)

    def done_with(self, states: StoredStates) -> None:
        """States need not be in memory any more."""
        if not self._keeping:
            self._let_go()

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """While it lasts, the states that were at hand last stay so until others are: who writes them part by part
        moves them once."""
        before, self._keeping = self._keeping, True
        try:
            yield
        finally:
            self._keeping = before
            if not before:
                self._let_go()

    def _let_go(self) -> None:
        if self._held is None:
            return
        (states, buffer), self._held = self._held, None
        if states.is_at_hand:
            raise StateError(f"the states of {states.name} are still looked at, and others are asked for")
        if not states.take_changed():
            states.brought(None)
            return
        # The caller may go on only when the states are on the disk, or it knows that they are not.
        self._lane.submit(lambda: states.store(buffer), nbytes=states.used_bytes).synchronize()

    # --- the file --------------------------------------------------------------------------------------------------

    def new_extent(self, nbytes: int, name: str) -> Extent:
        """Room on the disk; `DiskError` if it has none."""
        try:
            if self._file is None:
                self._file = self._open(self._expected_bytes)
            extent = self._file.extent(nbytes)
        except FileError as error:
            raise self._failed(error, name) from error
        self._count(extent.nbytes)
        return extent

    def give_back(self, extent: Extent) -> None:
        """Nobody needs an extent any more."""
        if self._file is not None:
            self._file.give_back(extent)
        self._count(-extent.nbytes)

    def count_in(self, arena: Arena, expected_bytes: int = 0) -> None:
        """Have the extents counted by an arena from here on, as under another plan, which foresees so many bytes of
        them."""
        self._arena, self._expected_bytes = arena, expected_bytes
        arena.count(self._extents_bytes, "disk", "optimizer_states")

    def _count(self, nbytes: int) -> None:
        self._extents_bytes += nbytes
        if self._arena is not None:
            self._arena.count(nbytes, "disk", "optimizer_states")

    def transfer(self, way: str, extent: Extent, memory: torch.Tensor, name: str, first: int = 0) -> None:
        """Move bytes between an extent and page-aligned memory; `DiskError` where the disk fails."""
        if self._file is None:
            raise StateError("states are moved before there is a file")
        view: memoryview = memory.numpy().data
        try:
            (self._file.read if way == "read" else self._file.write)(extent, view, first)
        except FileError as error:
            raise self._failed(error, name) from error
        except Exception as error:  # such as too little memory, or no more threads: what was moved is not known
            text = f"{type(error).__name__}: {error}"
            raise self._failed(FileError(EIO, text, self._file.paths, way), name) from error

    def enlarge(self, buffer: HostBuffer, nbytes: int) -> None:
        """More room in a buffer of the window, which keeps what it holds."""
        self._buffers.enlarge(WINDOW, buffer, nbytes)

    def _failed(self, error: FileError, name: str) -> DiskError:
        found = DiskError(error, name)
        if self.lost is None:
            self.lost = found
            logger.error("%s", found)
        return found

    def close(self) -> None:
        """Give the file back; nothing may be under way."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _nowhere(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory: reads give NaN, or the largest number of the dtype; writes raise."""
    value = math.nan if dtype.is_floating_point else 1 if dtype is torch.bool else torch.iinfo(dtype).max
    return torch.full((1,), value, dtype=dtype, device="cpu").as_strided(tuple(shape), (0,) * len(shape))
