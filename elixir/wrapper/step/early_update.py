"""`EarlyUpdate`: new states that the host makes while backward still runs, before norm and loss scale are known.

A chunk whose gradients are home is stepped at once, into a second set of states next to the one of now. Until
`ElixirOptimizer.step` nothing else has changed: weights are shown, saved, loaded, evaluated and differentiated as if
nothing had begun. Then the norm of all gradients and the loss scale are known. If the gradients are to be multiplied by
the factor with which the new states were made, and neither they nor the old states nor any option has changed since,
the new states are kept: the two sets change places. Otherwise the chunk is stepped as it would have been. Both give the
same bits, so ranks may differ in what they kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elixir.chunk.arena import Arena
from elixir.chunk.chunk import Chunk
from elixir.chunk.lanes import Ticket
from elixir.wrapper.step.elementwise import same_options
from elixir.wrapper.step.segments import Arrived, cut_segments
from elixir.wrapper.step.states import States


@dataclass(frozen=True)
class Inputs:
    """All that new states are made of, but for the old ones."""

    arrived: Arrived
    """The segments with a gradient, and it."""
    gradients: torch.Tensor | None
    """The gradients of the whole shard, where they lie in one tensor."""
    factor: float | torch.Tensor
    """The gradients are multiplied by it; a tensor on the device only where `Shard.accepts_tensor_factor`."""
    options: list[dict[str, Any]]
    """Hyperparameters, by group."""
    writes: int
    """`Chunk.writes`."""
    changes: int
    """`ShardGradients.changes`."""
    in_place: bool = False
    """Whether the gradients themselves are multiplied, as torch.nn.utils.clip_grad_norm_ does it, where they have the
    weights' dtype. A copy would take memory that no plan counts, and half the time of the step."""

    def multiply_in_place(self, dtype: torch.dtype) -> float | torch.Tensor:
        """Multiplies the gradients where that is done in place; the factor that is left.

        Args:
            dtype: of what is stepped.
        """
        # A tensor is not compared: this thread would wait for the device.
        scales = isinstance(self.factor, torch.Tensor) or self.factor != 1.0
        if not (self.in_place and scales and self.arrived and self.arrived[0][1].dtype == dtype):
            return self.factor
        for _, gradient in self.arrived:
            gradient.mul_(self.factor)
        return 1.0

    def equal(self, other: Inputs) -> bool:
        """Whether another update of the same states would make the same of them."""
        if isinstance(self.factor, torch.Tensor) or isinstance(other.factor, torch.Tensor):
            return False  # to compare them is to wait for the device
        mine = self.factor, self.writes, self.changes, [segment.name for segment, _ in self.arrived]
        theirs = other.factor, other.writes, other.changes, [segment.name for segment, _ in other.arrived]
        return mine == theirs and same_options(self.options, other.options)


class EarlyUpdate:
    """One early update.

    Args:
        inputs: what the new states are made of, with all segments.
        old: the states of now.
        new: takes the new ones.
        after: the work that brings the gradients, and the work that still uses the memory of the new states.
    """

    ticket: Ticket
    """The work that `run` is."""

    def __init__(self, inputs: Inputs, old: States, new: States, after: list[Ticket]) -> None:
        self.inputs, self.after = inputs, after
        self._old, self._new = old, new
        # As of now: states may change places before `run` begins.
        self.rounded, self._old_rounded = new.weights, old.weights
        self._is_discarded = self._is_kept = False
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def run(self, release: Callable[[], None] | None, forms: deque[str]) -> None:
        """Makes the new states, on the lane of CPU Adam.

        Args:
            release: the checkpoint's hook (`Chunk.before_write`).
            forms: gets those of the step.
        """
        if self._is_discarded:
            return
        try:
            for ticket in self.after:
                ticket.synchronize()  # it is over; its error is raised here, as an ordinary step would raise it
            if release is not None:
                release()  # else a running checkpoint would read the new states
            inputs = self.inputs
            for states in (self._old, self._new):
                states.set_options(inputs.options)
            forms.extend(self._old.step(inputs.arrived, inputs.gradients, inputs.factor, self.rounded, self._new))
        except Exception as error:
            with self._lock:
                self._error = error
                if not self._is_kept:
                    return  # the chunk is stepped as it would have been, which raises the same if it must
            self._new.copy_from(self._old)
            if self.rounded is not None and self._old_rounded is not None:
                self.rounded.copy_(self._old_rounded)
            raise

    def keep(self) -> bool:
        """Whether the new states can be those of the chunk from here on; not if they could not be made."""
        with self._lock:
            self._is_kept = self._error is None
        return self._is_kept

    def discard(self) -> None:
        """Drops the new states; work that has not begun does nothing."""
        self._is_discarded = True


def second_set(chunk: Chunk, states: States, arena: Arena, group_of: Mapping[nn.Parameter, int]) -> States:
    """Memory for the states of a shard once more, counted as the plan counts it, with the weights that they round to.

    Args:
        chunk: of the shard.
        states: those of now, which can be copied.
        arena: makes the memory.
        group_of: as of `cut_segments`.
    """

    def memory(numel: int, dtype: torch.dtype, *, pin: bool = False) -> torch.Tensor:
        return arena.make(numel, dtype, "host", "new_states", pin=pin)

    copied = chunk.masters is None or (chunk.plan.weight_home != "host" and not chunk.low_precision)
    master = memory(chunk.shard_numel, states.master.dtype, pin=copied)
    second = states.empty_like(master, cut_segments(chunk, master, group_of), memory)
    if chunk.low_precision:
        second.weights = memory(chunk.shard_numel, chunk.dtype, pin=True)
    return second
