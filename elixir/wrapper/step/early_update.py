"""`EarlyUpdate`: new states that CPU Adam computes during backward, before norm and loss scale are known.

Once the gradients of a chunk have reached their home, CPU Adam steps it into a second set of states. Nothing else
changes until `ElixirOptimizer.step`: the model shows, saves, loads and evaluates the old weights. `step` knows the norm
of all gradients and the loss scale. It keeps the new states, by swapping the two sets, if they were computed with the
right factor and neither gradients, old states nor options have changed since. Otherwise it discards them and steps the
chunk again. Both ways give the same bits, so ranks may keep different chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from elixir.chunk.memory import Memory, written
from elixir.wrapper.step.elementwise import same_options
from elixir.wrapper.step.segments import Arrived, Segment
from elixir.wrapper.step.states import States


def scales(factor: float | torch.Tensor) -> bool:
    """Whether gradients are multiplied. A tensor is not compared, since this thread would wait for the device."""
    return isinstance(factor, torch.Tensor) or factor != 1.0


Step = Callable[..., set[str]]
"""`elixir.wrapper.step.rules.Rule.step`."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of an update, apart from the old states."""

    arrived: Arrived
    """The segments that got a gradient, each with it."""
    gradients: torch.Tensor | None
    """The gradients of the whole shard, if they lie in one tensor."""
    factor: float | torch.Tensor
    """The factor by which gradients are multiplied; a tensor on the device only if `Shard.accepts_tensor_factor`."""
    options: list[dict[str, Any]]
    """Hyperparameters, by group."""
    writes: int
    """`Chunk.writes`."""
    changes: int
    """`ShardGradients.changes`."""
    in_place: bool = False
    """Whether gradients in the weights' dtype are multiplied in place, as torch.nn.utils.clip_grad_norm_ does it. A
    copy would take memory that no plan counts, and half the time of the step."""

    def of(self, segments: Sequence[Segment]) -> Inputs:
        """The same for another set of states, by its segments."""
        mine = {segment.place: segment for segment in segments}
        return replace(self, arrived=[(mine[segment.place], gradient) for segment, gradient in self.arrived])

    def multiply_in_place(self, dtype: torch.dtype) -> float | torch.Tensor:
        """Multiplies the gradients if `in_place` allows it; returns the factor that is left.

        Args:
            dtype: the dtype of the weights that are stepped.
        """
        if not (self.in_place and scales(self.factor) and self.arrived and self.arrived[0][1].dtype == dtype):
            return self.factor
        for _, gradient in self.arrived:
            gradient.mul_(self.factor)
        return 1.0

    def equal(self, other: Inputs) -> bool:
        """Whether an update of the same states with `other` gives the same result."""
        if isinstance(self.factor, torch.Tensor) or isinstance(other.factor, torch.Tensor):
            return False  # comparing them would wait for the device
        mine = self.factor, self.writes, self.changes, [segment.name for segment, _ in self.arrived]
        theirs = other.factor, other.writes, other.changes, [segment.name for segment, _ in other.arrived]
        return mine == theirs and same_options(self.options, other.options)


class EarlyUpdate:
    """One early update.

    Args:
        inputs: the inputs of the update, with all segments of the shard.
        step: steps `old` into `new`: `Rule.step`.
        old: the current states.
        new: takes the new ones.
        reads: memory of the gradients, and of the current states.
    """

    def __init__(self, inputs: Inputs, step: Step, old: States, new: States, reads: tuple[Memory, ...]) -> None:
        self.inputs, self.reads, self._filling = inputs, reads, written(*reads)
        self._step, self._old, self._new = step, old, new
        # Read now, since the two sets may be swapped before `run` begins.
        self.rounded, self._old_rounded = new.weights, old.weights
        self._is_discarded = False

    def run(self, release: Callable[[], None] | None, forms: deque[str]) -> None:
        """Computes the new states, on the lane of CPU Adam.

        Args:
            release: the checkpoint's hook (`Chunk.before_write`).
            forms: takes the forms of the step.
        """
        if self._is_discarded:
            return
        try:
            for ticket in self._filling:
                if ticket.error is not None:  # all of them are over
                    raise ticket.error
            if release is not None:
                release()  # otherwise a running checkpoint would read the new states
            forms.extend(self._step(self._old, self.inputs, self.inputs.factor, self.rounded, self._new))
        except BaseException:  # they may be what is saved of the weights after this
            self._new.become(self._old)
            if self.rounded is not None and self._old_rounded is not None:
                self.rounded.copy_(self._old_rounded)
            raise

    def discard(self) -> None:
        """Discards the new states; if `run` has not begun, it will do nothing."""
        self._is_discarded = True
