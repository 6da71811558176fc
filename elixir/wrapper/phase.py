"""The phase of a step: what a rank is doing, and the only ways from one phase to the next."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator

from elixir.access.autograd import backward_is_running
from elixir.chunk.lanes import closed
from elixir.errors import InputError, StateError


class Phase(enum.Enum):
    """The part of a step in which a rank is, and who holds which memory meanwhile."""

    IDLE = "outside of forward and backward"
    """Nothing is pinned; blocks may go on holding weights. Gradients of earlier backwards are at the home of the
    states, or on their way there out of gradient blocks."""
    FORWARD = "in forward"
    """Modules that run pin blocks. What autograd saves of a weight is a handle without memory."""
    BACKWARD = "in backward"
    """The autograd node that runs pins blocks. Gradient blocks hold what arrives, until a lane has taken it home."""
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
        rank: this one; for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.now = Phase.IDLE
        self.in_backward = False
        """Whether a backward runs, or has raised and nobody has noticed yet. Kept, since every access asks."""
        self._forwards: list[int] = []  # the thread of each forward that runs, one inside of the other

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
        """Whether the model was given back."""
        return self.now is Phase.CLOSED

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A forward runs for as long as this lasts: no other thread may begin one.

        Raises:
            InputError: another thread runs one.
        """
        thread = threading.get_ident()
        # A forward may wait for a backward that runs a part of it again, on a thread of the engine.
        if any(other != thread for other in self._forwards) and not backward_is_running():
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
        """A forward starts. One inside of a backward, as of a checkpoint around the wrapper, is part of that."""
        if self.now is Phase.IDLE:
            self.to(Phase.FORWARD)

    def leave_forward(self) -> None:
        """A forward has returned or raised. A backward that it ran may have ended it already."""
        if self.now is Phase.FORWARD:
            self.to(Phase.IDLE)

    def leave_backward(self) -> None:
        """A backward is over, or has raised."""
        if self.in_backward:
            self.to(Phase.IDLE)

    def close(self) -> None:
        """The model is given back, whatever it was doing."""
        self.leave_backward()
        self.leave_forward()
        self.to(Phase.CLOSED)

    def refuse_closed(self) -> None:
        """Raises `InputError` after `close`."""
        if self.closed:
            raise closed()
