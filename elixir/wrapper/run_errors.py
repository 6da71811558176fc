"""The errors that a run has met and not reported yet, or reports again and again: `ErrorKind` is the table.

A lane fails while the program does something else, and a disk on one rank while the others go on. `RunErrors` keeps
such errors until a call comes that reports them. An error of the call itself is raised there, and never comes here.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import NamedTuple

from elixir.chunk.lanes import is_reported
from elixir.chunk.state_window import StateWindow
from elixir.errors import InputError, RankError

logger = logging.getLogger(__name__)


class Call(enum.Enum):
    """A place in a call of the user's at which errors are reported."""

    USE = "whatever runs the model, steps it, or looks at its weights or states, at its beginning"
    RUN = "a forward, or settle(), once lanes have been looked at"
    GRADIENTS = "step() or clip_grad_norm_(), once lanes have been looked at"
    STEP = "step() at its beginning, the end of a forward, and wherever ranks have exchanged reports of their disks"
    ONE_STEP = "whatever needs the states of one step, as a checkpoint; it reports to other ranks, and ends nothing"


class _Rule(NamedTuple):
    reported_by: tuple[Call, ...]
    """The calls that raise the error. Others may go on: weights can be had from all that `Call.USE` lets through."""
    once: bool = False
    """Whether the call that raises it ends it. Otherwise all such calls raise it, until `RunErrors.end`, if ever."""
    agreed: bool = False
    """Whether several ranks exchange reports before any of them raises it: one that stopped alone would leave the
    others without a word, and nobody could save."""


class ErrorKind(enum.Enum):
    """The table. If there are several errors, a call raises that of the kind that comes first here."""

    CHANGE = _Rule((Call.USE,))
    """A load, or a method of the optimizer that rewrites all weights, did not come to its end, which all ranks know. A
    whole load ends it."""
    LANE = _Rule((Call.RUN, Call.GRADIENTS, Call.ONE_STEP), once=True)
    """Work of a lane has failed, such as a chunk's step. Once the error is raised the run may go on."""
    DISK = _Rule((Call.RUN, Call.STEP, Call.ONE_STEP), agreed=True)
    """A disk of this rank, or of another, has lost states. Nothing ends it: weights can be saved, not trained."""


def changed_in_part(why: str) -> InputError:
    """The error of kind `CHANGE`, for the reason `why`."""
    return InputError(f"{why}, so weights and states are old in part; load a checkpoint that is whole")


class RunErrors:
    """The errors of one model on one rank, one of each kind.

    Args:
        window: knows whether this rank's disk has lost states.
        rank_count: of the group.
    """

    def __init__(self, window: StateWindow, rank_count: int) -> None:
        self._window, self._rank_count = window, rank_count
        self._found: dict[ErrorKind, Exception] = {}

    def record(self, kind: ErrorKind, error: Exception) -> None:
        """Keeps an error: the first of a kind that is raised once, the newest of others."""
        if not (kind.value.once and kind in self._found):
            self._found[kind] = error

    def record_next_to(self, what: str, failed: Sequence[Exception]) -> None:
        """Records the errors of lanes that were met when `what` raised, apart from the error that it raised.

        If several are of one class, as those of the chunks of a step, one reports all.
        """
        reported = {type(error) for error in failed if is_reported(error)}
        for error in failed:
            if not is_reported(error):
                logger.error("%s has raised, and so has a lane, which is not reported yet: %s", what, error)
            if type(error) not in reported:
                self.record(ErrorKind.LANE, error)

    def end(self, kind: ErrorKind) -> list[Exception]:
        """Forgets the error of a kind; it, if there was one."""
        return [self._found.pop(kind)] if kind in self._found else []

    def report(self, call: Call) -> None:
        """Raises the first error that `call` reports, if there is one."""
        for kind in ErrorKind:
            error, rule = self._found.get(kind), kind.value
            if error is None and rule.agreed and (self._rank_count == 1 or call is Call.ONE_STEP):
                error = self._window.lost
            if error is not None and call in rule.reported_by:
                if rule.once and call is not Call.ONE_STEP:
                    self.end(kind)
                raise error if rule.once else error.with_traceback(None)  # or each call would add its frames

    @property
    def of_disk(self) -> str | None:
        """The report to other ranks: the message, if a disk of this rank has lost states."""
        return None if self._window.lost is None else str(self._window.lost)

    def agree(self, reports: Sequence[str | None]) -> None:
        """Stops on all ranks if a disk of one of them has lost states.

        Args:
            reports: every rank's `of_disk`.

        Raises:
            DiskError: this rank has. RankError: another has.
        """
        lost = next((each for each in reports if each is not None), None)
        if lost is not None:
            self.record(ErrorKind.DISK, self._window.lost or RankError(lost))
        self.report(Call.STEP)
