"""The phase of a step: what a rank is doing, and the allowed changes between phases; and the errors that end a run."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator, Sequence

from elixir.access.autograd import backward_is_running
from elixir.access.interrupts import hold_back
from elixir.chunk.lanes import closed
from elixir.chunk.memory import Fate
from elixir.errors import DiskError, InputError, RankError, StateError, StepError


class Phase(enum.Enum):
    """The part of a step that a rank is in, and who holds which memory meanwhile."""

    IDLE = "outside of forward and backward"
    """Nothing is pinned; blocks may still hold weights. Gradients of earlier backwards are at the home of the states,
    or on their way there from gradient blocks."""
    FORWARD = "in forward"
    """Running modules pin blocks. Autograd saves a weight as a handle without memory."""
    BACKWARD = "in backward"
    """The running autograd node pins blocks. Gradient blocks hold new gradients until a lane has taken them home."""
    CLOSED = "closed"
    """The model's parameters own their memory again; the lanes have ended."""


_NEXT = {
    Phase.IDLE: (Phase.FORWARD, Phase.BACKWARD, Phase.CLOSED),
    Phase.FORWARD: (Phase.IDLE, Phase.BACKWARD),  # a forward may run a backward, as for a penalty on gradients
    Phase.BACKWARD: (Phase.IDLE,),
    Phase.CLOSED: (),
}


class StepPhase:
    """The phase of one model on one rank.

    Args:
        rank: this rank, for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.now = Phase.IDLE
        self.in_backward = False
        """Whether a backward runs, or has raised unnoticed. An attribute, since every access reads it."""
        self.takes_turns = False
        """Whether forwards on several threads take turns, of which one runs at a time."""
        self._forwards: list[int] = []  # the threads of nested running forwards

    def to(self, phase: Phase) -> None:
        """Changes the phase.

        Raises:
            StateError: the change is not allowed.
        """
        if phase not in _NEXT[self.now]:
            raise StateError(f"rank {self._rank}: a step cannot go from '{self.now.value}' to '{phase.value}'")
        self.now = phase
        self.in_backward = phase is Phase.BACKWARD

    @property
    def closed(self) -> bool:
        """Whether `close` has given the model back."""
        return self.now is Phase.CLOSED

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wraps a forward: no other thread may begin one meanwhile.

        Raises:
            InputError: another thread runs one.
        """
        thread = threading.get_ident()
        # A backward on an autograd thread may recompute a part of a forward that waits for it.
        others = not self.takes_turns and any(other != thread for other in self._forwards)
        if others and not backward_is_running():
            raise InputError(
                "another thread is in a forward of this model: blocks hold the weights of one forward; call the model "
                "from one thread at a time, such as inside of a lock"
            )
        self._forwards.append(thread)
        try:
            yield
        finally:
            self._forwards.remove(thread)

    def enter_forward(self) -> None:
        """Enters forward. A forward inside of backward, as under activation checkpointing, belongs to that backward."""
        if self.now is Phase.IDLE:
            self.to(Phase.FORWARD)

    def leave_forward(self) -> None:
        """Leaves forward, if a backward inside of it has not ended the phase already."""
        if self.now is Phase.FORWARD:
            self.to(Phase.IDLE)

    def leave_backward(self) -> None:
        """Leaves backward."""
        if self.in_backward:
            self.to(Phase.IDLE)

    def close(self) -> None:
        """Changes to `CLOSED` from any phase."""
        self.leave_backward()
        self.leave_forward()
        self.to(Phase.CLOSED)

    def refuse_closed(self) -> None:
        """Raises `InputError` after `close`. Calls of the user's ask this first."""
        if self.closed:
            raise closed()
        hold_back()


# --- errors that end a run -------------------------------------------------------------------------------------------
# `RunErrors`: the errors that end a run, or wait for a load, and the calls that raise them.
#
# A lane fails while the program does something else, and a disk fails on one rank while others go on. Training ends
# then, and weights can still be read and saved. An error of a call itself is raised there and never recorded here.


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
