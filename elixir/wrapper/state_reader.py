"""`StateReader`: what reads the states of a run while training goes on, as a checkpoint that is being written does."""

from __future__ import annotations

from typing import Protocol


class StateReader(Protocol):
    """Has a hook on every chunk that it still reads (`Chunk.before_write`), for steps; the rest is here."""

    def let_go(self) -> None:
        """Waits until no live memory is read: chunks are about to be replaced."""

    def close(self) -> Exception | None:
        """Waits until all is written; the error, if it was not reported yet."""
