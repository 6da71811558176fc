"""The phase of a step: what a rank is doing, and the allowed changes between phases."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator

from elixir.access.autograd import backward_is_running
from elixir.access.interrupts import hold_back
from elixir.chunk.lanes import closed
from elixir.errors import InputError, StateError


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
