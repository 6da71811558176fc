"""`HeartbeatGroup`: exchanges between ranks that may still write; heartbeats report errors and dead ranks."""

from __future__ import annotations

import time
from typing import Any

from elixir.chunk.group import Group
from elixir.errors import CheckpointError, ElixirError, RankError

LONGEST_PERIOD_S = 10.0
"""Longest time after which a rank that writes reports that it is alive, and learns whether others have failed."""
_HEARTBEATS_PER_TIMEOUT = 8
_WHAT = "checkpoint"


class HeartbeatGroup:
    """Exchanges between the saving threads of all ranks, made of rounds of `Group.exchange`.

    A rank that waits in `exchange` starts a round at once, and again after each in which somebody was not ready. A rank
    that is still writing joins by `heartbeat` between two pieces of work. So a rank may write for longer than the
    timeout of the group, and a rank that is gone is still noticed within it.

    Args:
        group: used by these rounds only.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        timeout_s = group.timeout_s
        self._every_s = (
            LONGEST_PERIOD_S if timeout_s is None else min(LONGEST_PERIOD_S, timeout_s / _HEARTBEATS_PER_TIMEOUT)
        )
        self._last = time.monotonic()
        self._ended = group.size == 1

    def heartbeat(self) -> None:
        """Joins a round if one is due; called between two pieces of work. Raises what `exchange` raises."""
        if not self._ended and time.monotonic() - self._last >= self._every_s:
            self._round(False, None, None)

    def exchange(self, value: Any = None) -> list[Any]:
        """Returns every rank's value, in order of rank, once all have come here.

        Raises:
            CheckpointError: another rank has failed, or is gone.
        """
        if self._group.size == 1:
            return [value]
        while True:
            answers = self._round(True, value, None)
            if all(ready for ready, _, _ in answers):
                return [theirs for _, theirs, _ in answers]

    def fail(self, error: BaseException) -> CheckpointError:
        """Tells the others that this rank has failed, unless they know it; returns the error that all ranks raise."""
        if not self._ended:
            try:
                self._round(True, None, _in_words(error))
            except CheckpointError as together:
                return together
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(_in_words(error))

    def _round(self, ready: bool, value: Any, problem: str | None) -> list[Any]:
        try:
            answers = self._group.exchange(_WHAT, (ready, value, problem))
        except RankError as error:
            self._ended = True
            raise CheckpointError(
                f"the checkpoint was given up, because the ranks have lost each other: {error}"
            ) from error
        self._last = time.monotonic()
        for rank, (_, _, theirs) in enumerate(answers):
            if theirs is not None:
                self._ended = True
                raise CheckpointError(f"rank {rank}: {theirs}")
        return answers


def _in_words(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, (ElixirError, OSError)) else f"{type(error).__name__}: {text}"
