"""`Loaded`: the checkpoint that was saved or loaded, and what is not exact about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was saved or loaded."""

    folder: Path
    """The checkpoint's folder."""
    step: int | None
    """The step that the save was given."""
    sequence: int
    """The larger, the later: among the checkpoints of one folder the one with the largest is the latest."""
    world_size: int
    """Ranks that saved it."""
    notes: tuple[str, ...] = ()
    """One sentence for each thing that was rounded, skipped or left as it was."""

    @property
    def exact(self) -> bool:
        """Whether training goes on with the bits with which it would have gone on without a break."""
        return not self.notes
