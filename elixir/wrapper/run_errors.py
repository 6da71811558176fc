"""`RunErrors`: the errors that end a run, or wait for a load, and the calls that raise them.

A lane fails while the program does something else, and a disk fails on one rank while others go on. Training ends then,
and weights can still be read and saved. An error of a call itself is raised there and never recorded here.
"""

from __future__ import annotations

from collections.abc import Sequence

from elixir.chunk.memory import Fate
from elixir.errors import DiskError, InputError, RankError, StepError


class RunErrors:
    """The errors that one model has met on one rank.

    Args:
        fate: of the lanes.
        rank_count: the number of ranks.
    """

    def __init__(self, fate: Fate, rank_count: int) -> None:
        self._fate, self._rank_count = fate, rank_count
        self._agreed: Exception | None = None  # a disk of some rank has lost states, as all ranks know
        self.changed: InputError | None = None
        """A load failed halfway, or a method of the optimizer that rewrites all weights. All ranks know it; a complete
        load ends it."""

    def changed_in_part(self, why: str) -> None:
        """Makes the model refuse all use, for the reason `why`, until it is loaded whole."""
        self.changed = InputError(f"{why}, so weights and states are old in part; load a checkpoint that is whole")

    def refuse_changed(self) -> None:
        """Raises if weights and states are old in part: nothing that reads them may go on."""
        if self.changed is not None:
            raise self.changed.with_traceback(None)  # each call would add its frames

    def refuse_failed(self, *, alone: bool = False) -> None:
        """Raises if a lane has failed, or a disk: nothing that trains may go on.

        A rank whose disk has failed goes on until all know of it (`agree`), or others would wait for it for ever.

        Args:
            alone: the caller needs the states of one step, and tells other ranks itself.
        """
        error = self._agreed or self._fate.error
        if error is None or (isinstance(error, DiskError) and self._rank_count > 1 and not (alone or self._agreed)):
            return
        if isinstance(error, (DiskError, RankError)):
            raise error.with_traceback(None)
        # One rank that has failed cannot gather weights while others train on.
        left = "" if self._rank_count > 1 else "state_dict(), gathered() and close() still give the weights; "
        raise StepError(
            f"training has ended, since work on a lane has failed: {error or type(error).__name__}. {left}wrap the "
            "model again to go on from a checkpoint"
        ) from error

    @property
    def of_disk(self) -> str | None:
        """The message for other ranks if a disk of this rank has lost states."""
        return str(self._fate.error) if isinstance(self._fate.error, DiskError) else None

    def agree(self, reports: Sequence[str | None]) -> None:
        """Raises on all ranks if a disk of one of them has lost states.

        Args:
            reports: every rank's `of_disk`.

        Raises:
            DiskError: a disk of this rank has. RankError: a disk of another rank has.
        """
        lost = next((each for each in reports if each is not None), None)
        if lost is not None:
            mine = self._fate.error
            self._agreed = mine if isinstance(mine, DiskError) else RankError(lost)
        self.refuse_failed()
