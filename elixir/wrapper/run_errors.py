"""`RunErrors`: errors that a run has met and must still report; `ErrorKind` is the table of their rules.

A lane fails while the program does something else, and a disk fails on one rank while others go on. `RunErrors` keeps
such errors until a call reports them. An error of the call itself is raised there and never recorded here.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import NamedTuple

from elixir.chunk.memory import is_reported
from elixir.chunk.state_window import StateWindow
from elixir.errors import InputError, RankError

logger = logging.getLogger(__name__)


class Call(enum.Enum):
    """A moment in a user's call at which errors are reported."""

    USE = "whatever runs the model, steps it, or looks at its weights or states, at its beginning"
    RUN = "a forward, or settle(), once lanes have been looked at"
    GRADIENTS = "step() or clip_grad_norm_(), once lanes have been looked at"
    STEP = "step() at its beginning, the end of a forward, and wherever ranks have exchanged reports of their disks"
    ONE_STEP = "whatever needs the states of one step, as a checkpoint; it reports to other ranks, and ends nothing"


class _Rule(NamedTuple):
    reported_by: tuple[Call, ...]
    """The calls that raise the error; others go on. Weights can be read as long as `Call.USE` does not raise."""
    once: bool = False
    """Whether the first call that raises the error ends it. Otherwise all such calls raise it until `RunErrors.end`."""
    agreed: bool = False
    """Whether ranks exchange reports before any raises it. A rank that stopped alone would leave the others waiting,
    and none could save."""


class ErrorKind(enum.Enum):
    """The kinds of errors and their rules. Of several errors a call raises the kind that comes first here."""

    CHANGE = _Rule((Call.USE,))
    """A load failed halfway, or a method of the optimizer that rewrites all weights. All ranks know it; a complete load
    ends it."""
    LANE = _Rule((Call.RUN, Call.GRADIENTS, Call.ONE_STEP), once=True)
    """Work of a lane has failed, such as a chunk's step. After the error was raised once, the run may go on."""
    DISK = _Rule((Call.RUN, Call.STEP, Call.ONE_STEP), agreed=True)
    """A disk of some rank has lost states. Nothing ends it: weights can be saved but not trained."""


def changed_in_part(why: str) -> InputError:
    """Creates an error of kind `CHANGE`, for the reason `why`."""
    return InputError(f"{why}, so weights and states are old in part; load a checkpoint that is whole")


class RunErrors:
    """The unreported errors of one model on one rank, at most one of each kind.

    Args:
        window: knows whether this rank's disk has lost states.
        rank_count: the number of ranks.
    """

    def __init__(self, window: StateWindow, rank_count: int) -> None:
        self._window, self._rank_count = window, rank_count
        self._found: dict[ErrorKind, Exception] = {}

    def record(self, kind: ErrorKind, error: Exception) -> None:
        """Records an error. Of kinds that are raised once the first stays, of others the newest."""
        if not (kind.value.once and kind in self._found):
            self._found[kind] = error

    def record_next_to(self, what: str, failed: Sequence[Exception]) -> None:
        """Records errors of lanes that were found when `what` raised, apart from its own error.

        Of several errors of one class, as from the chunks of one step, one is reported.
        """
        reported = {type(error) for error in failed if is_reported(error)}
        for error in failed:
            if not is_reported(error):
                logger.error("%s has raised, and so has a lane, which is not reported yet: %s", what, error)
            if type(error) not in reported:
                self.record(ErrorKind.LANE, error)

    def end(self, kind: ErrorKind) -> list[Exception]:
        """Removes and returns the error of a kind, if there is one."""
        return [self._found.pop(kind)] if kind in self._found else []

    def report(self, call: Call) -> None:
        """Raises the first error that `call` reports, if any."""
        for kind in ErrorKind:
            error, rule = self._found.get(kind), kind.value
            if error is None and rule.agreed and (self._rank_count == 1 or call is Call.ONE_STEP):
                error = self._window.lost
            if error is not None and call in rule.reported_by:
                if rule.once and call is not Call.ONE_STEP:
                    self.end(kind)
                raise error if rule.once else error.with_traceback(None)  # otherwise each call would add its frames

    @property
    def of_disk(self) -> str | None:
        """The message for other ranks if a disk of this rank has lost states."""
        return None if self._window.lost is None else str(self._window.lost)

    def agree(self, reports: Sequence[str | None]) -> None:
        """Raises on all ranks if a disk of one of them has lost states.

        Args:
            reports: every rank's `of_disk`.

        Raises:
            DiskError: a disk of this rank has. RankError: a disk of another rank has.
        """
        lost = next((each for each in reports if each is not None), None)
        if lost is not None:
            self.record(ErrorKind.DISK, self._window.lost or RankError(lost))
        self.report(Call.STEP)
