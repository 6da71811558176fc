"""`StateReader`: reads the states of a run while training goes on, such as a checkpoint that is being written."""

from __future__ import annotations

from typing import Protocol


class StateReader(Protocol):
    """A reader of live states. It has a hook on every chunk that it still reads (`Chunk.before_write`)."""

    def let_go(self) -> None:
        """Waits until it reads no live memory, since chunks are about to be replaced."""

    def close(self) -> Exception | None:
        """Waits until everything is written; returns an unreported error."""
