"""Which work of the lanes uses a piece of memory, so that what reads or writes it next comes after that."""

from __future__ import annotations

from elixir.chunk.lanes import Ticket, failure

_WRITER = "writer"


class MemoryUses:
    """Who last wrote a piece of memory, and who last read it, by lane.

    Work that reads comes after `to_read`, work that writes after `to_write`; then it is entered here. A lane works in
    order, so of its readers the last is enough. A reader stays until the next of its name even if the memory is written
    in between: two sets of states that change places have one such object, and the write may have gone to the other.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[str, Ticket] = {}

    def to_read(self) -> list[Ticket]:
        """The last work that writes."""
        return [self._last[_WRITER]] if _WRITER in self._last else []

    def to_write(self) -> list[Ticket]:
        """The last work that writes, and the last that reads in each lane."""
        return [*self._last.values()]

    def written_by(self, ticket: Ticket) -> Ticket:
        """Enters work that writes; gives its ticket."""
        self._last[_WRITER] = ticket
        return ticket

    def read_by(self, name: str, ticket: Ticket) -> Ticket:
        """Enters work that reads, in the lane that does all reads of this name; gives its ticket."""
        self._last[name] = ticket
        return ticket

    @property
    def has_failed(self) -> bool:
        """Whether the last work that writes is over and has failed."""
        ticket = self._last.get(_WRITER)
        return ticket is not None and ticket.done() and failure(ticket) is not None

    def failures(self) -> list[Exception]:
        """Errors of the work, each once, when all of it is over; nothing waits for what has failed any more."""
        errors = {name: error for name, ticket in self._last.items() if (error := failure(ticket)) is not None}
        for name in errors:
            del self._last[name]
        return list(dict.fromkeys(errors.values()))
