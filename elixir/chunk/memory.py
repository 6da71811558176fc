"""`Memory`: a piece of memory that knows the work that uses it; and tickets of work.

Work that is submitted to a lane says which memory it reads and which it writes (`Lane.submit`), and that is all its
order. What reads comes after the last work that writes, and fails if that has failed. What writes comes after all users
before it, whether or not they have failed. Memory that is changed in place is read and written.

`Memory.wait` and `Memory.synchronize` are for compute and for threads, which use memory, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from elixir.plan.chunk_plan import MemoryHome


class Ticket(Protocol):
    """A handle of work that was submitted."""

    def wait(self) -> None:
        """Lets compute that is submitted from here on wait for the work. Raises what the work raised."""

    def synchronize(self) -> None:
        """Blocks this thread until the work is done. Raises what the work raised."""

    def done(self) -> bool:
        """Whether the work is done."""


class _Thread(threading.local):
    is_lane = False
    """Whether this thread is a lane's: what it waits for keeps no compute waiting."""
    is_quiet = False
    """Whether it goes on after errors that it meets."""


THREAD = _Thread()
"""How the thread that runs takes errors of work."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Reports no error that this thread meets inside."""
    before, THREAD.is_quiet = THREAD.is_quiet, True
    try:
        yield
    finally:
        THREAD.is_quiet = before


def reported(error: BaseException) -> BaseException:
    """Marks an error of work as reported, unless a lane meets it; the caller raises it.

    Its traceback is again the one with which it left its work: every lane that hands it on would add frames.
    """
    if not (THREAD.is_lane or THREAD.is_quiet):
        error.elixir_reported = True  # type: ignore[attr-defined]
    first = vars(error).setdefault("elixir_raised_at", error.__traceback__)
    return error.with_traceback(first)


def is_reported(error: BaseException) -> bool:
    """Whether the error of some work has been raised by a ticket to another thread than a lane's, which passes it
    on."""
    return hasattr(error, "elixir_reported")


def failure(ticket: Ticket | None) -> Exception | None:
    """Waits for the work and returns its error, if there was one, without reporting it."""
    try:
        if ticket is not None:
            with quietly():
                ticket.synchronize()  # its work still uses buffers that the caller frees, or fills anew
    except Exception as error:
        return error
    return None


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
Count = Callable[[int, MemoryHome, str], None]
"""Counts so many more bytes in use, or fewer, as `elixir.chunk.arena.Arena.count`."""


class Memory:
    """A piece of memory: its tensor, where it is counted and as what, its last writer, and its last reader in each lane
    since. A lane works in order, so of its readers the last is enough.

    Args:
        tensor: lies there; none in memory of which others have the tensors, such as states that a class has made.
        count: counts its bytes; None if others do, or nobody.
        home: where it is counted.
        kind: as what.
    """

    __slots__ = ("_count", "_home", "_kind", "_whole", "readers", "tensor", "writer")

    def __init__(
        self, tensor: torch.Tensor = _NOTHING, count: Count | None = None, home: MemoryHome = "host", kind: str = ""
    ) -> None:
        self.tensor = tensor
        self._home, self._kind = home, kind
        self.writer: Ticket | None = None
        self.readers: dict[object, Ticket] = {}  # by lane
        self._whole: Memory | None = None
        self.count_by(count)

    # --- what it is ------------------------------------------------------------------------------------------------

    def count_by(self, count: Count | None, kind: str | None = None) -> None:
        """Counts it elsewhere from here on, as under another plan, and as something else if a `kind` is given."""
        self._count, self._kind = count, kind or self._kind
        if count is not None and self.tensor.nbytes:
            count(self.tensor.nbytes, self._home, self._kind)

    def free(self) -> None:
        """Gives up the tensor, which nothing uses any more."""
        if self._count is not None and self.tensor.nbytes:
            self._count(-self.tensor.nbytes, self._home, self._kind)
        self.tensor = _NOTHING

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of memory that was made as bytes."""
        return self.tensor[: numel * dtype.itemsize].view(dtype)

    def part(self, first: int, nbytes: int) -> Memory:
        """A part of it, with a separate writer and readers: work that writes there also waits for the users of other
        parts, which may have had the same bytes before."""
        found = Memory(self.tensor[first : first + nbytes])
        found._whole = self
        return found

    # --- the work that uses it -------------------------------------------------------------------------------------

    @property
    def users(self) -> list[Ticket]:
        """The last work that writes, and the last that reads in each lane."""
        own = [] if self.writer is None else [self.writer]
        return [*own, *self.readers.values(), *(() if self._whole is None else self._whole.users)]

    def used(self, lane: object, ticket: Ticket, *, writes: bool) -> None:
        """Enters work that reads or `writes` in a lane; for `Lane.submit`."""
        if self._whole is not None:
            self._whole.readers[lane] = ticket
        if writes:
            self.writer, self.readers = ticket, {}
        else:
            self.readers[lane] = ticket

    def wait(self, *, taking: bool = False) -> None:
        """Lets compute that reads it wait for its writer; or, `taking` it, for all users: compute, or what comes after
        compute, is the next. Raises what they raised."""
        # Compute reads what the work writes, or writes what it uses.
        self._follow(lambda ticket: ticket.wait(), taking=taking)

    def synchronize(self, *, taking: bool = False) -> None:
        """Blocks this thread until it may read; or, `taking` the memory, until nothing uses it. Raises what was
        raised."""
        # This thread does the same as compute above.
        self._follow(lambda ticket: ticket.synchronize(), taking=taking)

    def _follow(self, follow: Callable[[Ticket], None], *, taking: bool) -> None:
        # Those that read have waited for the one that writes.
        for ticket in [*(self.readers.values() if taking else ())] or written(self):
            follow(ticket)
        if taking:
            self.writer, self.readers = None, {}

    def failures(self) -> list[Exception]:
        """Errors of the work, each once, when all of it is over; nothing waits for what has failed any more."""
        errors = {ticket: error for ticket in self.users if (error := failure(ticket)) is not None}
        if self.writer in errors:
            self.writer = None
        self.readers = {lane: ticket for lane, ticket in self.readers.items() if ticket not in errors}
        return list(dict.fromkeys(errors.values()))


def order(reads: Iterable[Memory], writes: Iterable[Memory]) -> tuple[list[Ticket], list[Ticket]]:
    """The work after which work comes that reads and writes some memory.

    Returns:
        Work that fills what is read, whose errors it shares; and other users of what is written, of which only the end
        matters.
    """
    filling = written(*reads)
    return filling, list(dict.fromkeys(each for memory in writes for each in memory.users if each not in filling))


def written(*memories: Memory) -> list[Ticket]:
    """The last work that writes each."""
    return list(dict.fromkeys(memory.writer for memory in memories if memory.writer is not None))
