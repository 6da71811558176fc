"""Master weights and optimizer states that live on a disk, and the few host buffers through which they pass.

All of a chunk's masters and states are one extent of a file. In memory they are only while a buffer of the *window*
holds the extent: then the tensors that the optimizer steps are views of that buffer. At other times they have their
shape and dtype, and no memory: a read gives NaN, a write raises.

A step of a chunk is a chain of three: the disk lane reads the extent into a buffer, the CPU-Adam lane steps it there,
the disk lane writes it back. The lane reads as far ahead as there are buffers: read 0, read 1, read 2, write 0, read 3,
write 1, ... Whatever else looks at masters or states does so inside of `StoredStates.in_memory`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from elixir.chunk.host_buffers import WINDOW, HostBuffers
from elixir.chunk.lanes import Lanes, Work
from elixir.chunk.memory import Arena, Memory, Ticket
from elixir.errors import DiskError, StateError
from elixir.extents.extent_file import ExtentFile
from elixir.extents.stored_tensors import StoredTensors, TensorFile

MASTERS = "masters"
"""The first region of every extent."""


class StoredStates(StoredTensors):
    """Masters and states of one chunk, on a disk.

    Args:
        window: whose buffers they pass through.
        name: of the chunk, for errors.
        nbytes: size of the extent that a plan foresees; one that needs more gets a larger one.
    """

    def __init__(self, window: StateWindow, name: str, nbytes: int) -> None:
        super().__init__(window.file, name, nbytes)
        self._window = window
        self._buffer: Memory | None = None
        self._depth = 0
        self.on_disk = Memory()
        """The extent. The lane of the disk reads and writes it in order; others wait for the last write."""
        self.due_bytes = 0
        """Bytes of the extent that the lane has written once it has done what it was given so far."""

    def _enlarge(self) -> None:
        """States that no plan has foreseen: as much room in the buffer."""
        if self._buffer is None:
            return super()._enlarge()
        self._changed = True
        self._window.enlarge(self._buffer, self.nbytes)
        self.bind(self._buffer.tensor)

    def step(self, buffer: Memory, read: Ticket, work: Work) -> None:
        """Runs `work` while the tensors are views of a buffer into which they were `read`; `store` or `put_away` comes
        next. If the reading has failed, it does nothing, and `StateWindow.lost` reports the error."""
        if read.error is None:
            self.brought(buffer)
            work()

    @staticmethod
    def if_read(read: Ticket, work: Work) -> None:
        """Runs `work` unless the reading has failed."""
        if read.error is None:
            work()

    @contextlib.contextmanager
    def in_memory(self, write: bool = False) -> Iterator[None]:
        """Holds masters and states in memory for as long as this lasts; inside of another one, nothing is moved.

        Args:
            write: they are changed, so they are written back at the end.

        Raises:
            DiskError: the disk has failed, now or before.
        """
        if not self._depth:
            self._window.bring_in(self)
        self._depth += 1
        self._changed |= write
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._window.done_with()

    @property
    def is_at_hand(self) -> bool:
        """Whether code uses the states now."""
        return bool(self._depth)

    def brought(self, buffer: Memory | None) -> None:
        """Notes that the states are in a buffer now, or with None in no buffer; for the window."""
        self._buffer = buffer
        if buffer is None:
            self.put_away()
        else:
            self.bind(buffer.tensor)

    def take_changed(self) -> bool:
        """Whether the buffer has other values than the extent; after this call it counts as written."""
        changed, self._changed = self._changed, False
        return changed


class StateWindow:
    """The buffers, the lane and the file through which states on a disk come and go, of one rank.

    Args:
        lanes: the disk's is used.
        buffers: have the kind `WINDOW`.
        open_file: makes the file when the first extent is asked for.
    """

    def __init__(self, lanes: Lanes, buffers: HostBuffers, open_file: Callable[[], ExtentFile]) -> None:
        self._lane, self._counts, self._buffers = lanes.disk, lanes.counts, buffers
        self.file = TensorFile(open_file, self._count, lanes.fate.meet)
        self._arena: Arena | None = None
        self._extents_bytes = 0
        self._waiting: deque[tuple[StoredStates, Memory, Ticket]] = deque()
        """Steps whose write has not been given to the lane: reads of what comes next go first."""
        self._keeping = False
        self._held: tuple[StoredStates, Memory] | None = None
        """The extent that is in memory for code outside of steps, or was last, and its buffer."""

    @property
    def lost(self) -> DiskError | None:
        """The first error of the disk, after which no step is made."""
        return self.file.lost

    # --- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, states: StoredStates) -> tuple[Memory, Ticket]:
        """Gives a buffer for the step of a chunk, and the reading of its states into it."""
        self._let_go()
        count = len(self._buffers.of(WINDOW))
        while len(self._waiting) >= count or any(each is states for each, _, _ in self._waiting):
            self._write_next()
        buffer = self._buffers.take(WINDOW, states.nbytes)
        nbytes = min(states.used_bytes, max(states.kept_bytes, states.due_bytes))
        self._counts.disk_read_bytes += nbytes
        return buffer, self._read(states, buffer, nbytes)

    def _read(self, states: StoredStates, buffer: Memory, nbytes: int) -> Ticket:
        # The lane has written the states that are read now before; of what it could not write `fill` knows.
        return self._lane.submit(lambda: states.fill(buffer.tensor), writes=[buffer], nbytes=nbytes)

    def end_step(self, states: StoredStates, buffer: Memory, stepped: Ticket) -> None:
        """Writes the states back after `stepped` and after the readings of the next steps."""
        self._waiting.append((states, buffer, stepped))

    def flush(self) -> None:
        """Writes all states back, since no step comes next."""
        while self._waiting:
            self._write_next()

    def _write_next(self) -> None:
        states, buffer, stepped = self._waiting.popleft()
        nbytes = states.due_bytes = states.used_bytes

        def write() -> None:
            error = self.lost or stepped.error
            if error is not None:
                states.put_away()
                raise error  # a save that waits for these states must not take those of the step before for them
            states.store(buffer.tensor)

        # Whether or not the step has filled the buffer, which is free then, or has failed: the states on the disk stay.
        self._lane.submit(write, writes=[buffer, states.on_disk], nbytes=nbytes)
        self._counts.disk_written_bytes += nbytes

    # --- between steps ---------------------------------------------------------------------------------------------

    def bring_in(self, states: StoredStates) -> None:
        """Brings states into memory; returns when they are there."""
        if self._held is not None and self._held[0] is states:
            return
        self._let_go()
        self.flush()
        buffer = self._buffers.take(WINDOW, states.nbytes)
        buffer.settle()  # a lane may still read what was there
        self._lane.ask(lambda: states.fill(buffer.tensor))
        states.brought(buffer)
        self._held = (states, buffer)

    def done_with(self) -> None:
        """Lets the states that are at hand leave memory."""
        if not self._keeping:
            self._let_go()

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keeps the states that were at hand last in memory until others are at hand, so that a caller who writes them
        part by part moves them once."""
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
            raise StateError(f"the states of {states.name} are still in use, and others are asked for")
        if not states.take_changed():
            states.brought(None)
            return
        self._lane.ask(lambda: states.store(buffer.tensor))

    # --- the file --------------------------------------------------------------------------------------------------

    def count_in(self, arena: Arena) -> None:
        """Counts the extents in another arena from here on, as under another plan."""
        self._arena = arena
        arena.count(self._extents_bytes, "disk", "optimizer_states")

    def _count(self, nbytes: int) -> None:
        self._extents_bytes += nbytes
        if self._arena is not None:
            self._arena.count(nbytes, "disk", "optimizer_states")

    def enlarge(self, buffer: Memory, nbytes: int) -> None:
        """Enlarges a buffer of the window, which keeps what it holds."""
        self._buffers.enlarge(WINDOW, buffer, nbytes)

    def close(self) -> None:
        """Gives the file back; nothing may be under way."""
        self.file.close()
