"""`Memory`: a piece of memory that knows the work that uses it; and tickets of work.

Work that is submitted to a lane says which memory it reads and which it writes (`Lane.submit`), and that is all its
order. What reads comes after the last work that writes, and fails if that has failed. What writes comes after all users
before it, whether or not they have failed. Memory that is changed in place is read and written.

`Memory.wait` and `Memory.synchronize` are for compute and for threads, which use memory, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from elixir.plan.chunk_plan import MemoryHome


class Ticket(Protocol):
    """A handle of work that was submitted."""

    error: BaseException | None
    """The error of the work, once that is over."""
    drained: int
    """`Fate.drained` when it was submitted."""

    def wait(self) -> None:
        """Lets compute that is submitted from here on wait for the work. Raises what the work raised."""

    def synchronize(self) -> None:
        """Blocks this thread until the work is done. Raises what the work raised."""

    def join(self) -> None:
        """Blocks this thread until the work is over, whether or not it has failed."""

    def done(self) -> bool:
        """Whether the work is done."""


class Fate:
    """The first error of the work of some lanes: it ends the training that needs them."""

    error: BaseException | None = None
    drained = 0
    """How often all work was over, and its error known. Nobody who waits for work of before learns of its error any
    more, and what it should have written counts as written: it has the values of before, or some of each."""

    def meet(self, error: BaseException | None) -> None:
        """Notes the error of some work, if it has one."""
        if error is not None:
            vars(error).setdefault("elixir_raised_at", error.__traceback__)
        if self.error is None:
            self.error = error

    def check(self, ticket: Ticket) -> None:
        """Raises the error of work that is over, if it has failed and that is not known."""
        if ticket.error is not None and ticket.drained == self.drained:
            raise as_first(ticket.error)


def as_first(error: BaseException) -> BaseException:
    """An error of some work with the traceback with which it left that: all who hand it on would add frames."""
    return error.with_traceback(vars(error).get("elixir_raised_at"))


class _Thread(threading.local):
    is_lane = False
    """Whether this thread is a lane's: what it waits for keeps no compute waiting."""


THREAD = _Thread()
"""The kind of the thread that runs."""


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

    def settle(self) -> None:
        """Blocks this thread until nothing uses it any more, whether or not the work has failed."""
        for ticket in self.users:
            ticket.join()
        self.writer, self.readers = None, {}


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
