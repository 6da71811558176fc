"""The states of one shard, and new ones that are made of them without touching them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elixir.kernels.adam import COPIED, ONE_PASS, Kept, can_step_like, step_like, step_out_of_place_like
from elixir.wrapper.step.elementwise import set_options
from elixir.wrapper.step.fused_adam import FusedAdam
from elixir.wrapper.step.segments import Arrived, Segment, step_segments

BY_CLASS = "by its class"
"""The form of a step that the user's own class makes."""


@dataclass(frozen=True)
class ShardStates:
    """The states of a shard, and the optimizer over them. A chunk that speculates has two such sets."""

    master: torch.Tensor
    segments: list[Segment]
    optimizer: torch.optim.Optimizer | FusedAdam
    weights: torch.Tensor | None = None
    """Takes the weights that the master rounds to; None where they have as many bits."""

    def copy(self, other: ShardStates) -> None:
        """Have the values of the other set."""
        if isinstance(self.optimizer, FusedAdam) and isinstance(other.optimizer, FusedAdam):
            self.optimizer.copy(other.optimizer)
            return
        self.master.copy_(other.master)
        for mine, theirs in zip(self.segments, other.segments, strict=True):
            copy_state(other.optimizer.state[theirs.weights], self.optimizer.state[mine.weights])

    def restore(self, other: ShardStates) -> None:
        """Have the values of the other set, and its weights: new ones could not be made."""
        self.copy(other)
        if self.weights is not None and other.weights is not None:
            self.weights.copy_(other.weights)

    def step_from(
        self,
        old: ShardStates,
        arrived: Arrived,
        gradients: torch.Tensor | None,
        factor: float,
        hyperparameters: list[dict[str, Any]],
    ) -> set[str]:
        """Be the states that a step makes of `old`, which are left as they are.

        Args:
            old: the states of now.
            arrived: all segments of `old`, with their gradients.
            gradients: those of the whole shard, if they lie in one tensor.
            factor: gradients are multiplied by it.
            hyperparameters: by group.

        Returns:
            The forms of the step; see `adam_step_out_of_place`.
        """
        for optimizer in (self.optimizer, old.optimizer):
            for group, values in zip(optimizer.param_groups, hyperparameters, strict=True):
                set_options(group, values)
        if isinstance(self.optimizer, FusedAdam) and isinstance(old.optimizer, FusedAdam):
            return old.optimizer.step(arrived, gradients, factor, self.weights, self.optimizer)
        if isinstance(self.optimizer, FusedAdam) or self._made_in_one_pass(self.optimizer, old, arrived, factor):
            return {ONE_PASS}
        self.copy(old)
        mine = {segment.place: segment for segment in self.segments}
        theirs = [(mine[segment.place], gradient) for segment, gradient in arrived]
        step_segments(self.optimizer, self.segments, theirs, factor)
        if self.weights is not None:
            self.weights.copy_(self.master)
        return {COPIED}

    def step_with(
        self, optimizer: torch.optim.Optimizer, arrived: Arrived, factor: float | torch.Tensor, out: torch.Tensor | None
    ) -> set[str]:
        """Step the segments in `arrived` in place by the user's class.

        Args:
            optimizer: `self.optimizer`, which is no `FusedAdam`.
            arrived: segments with their gradients.
            factor: gradients are multiplied by it.
            out: where it can be done in the same pass over memory, takes the new weights of the shard, rounded.

        Returns:
            The forms of the step; unless that is `BY_CLASS`, `out` has the weights.
        """
        kept = [Kept(segment.weights, optimizer.state.get(segment.weights, {})) for segment, _ in arrived]
        if out is None or self.master.device.type != "cpu" or not can_step_like(optimizer, kept):
            step_segments(optimizer, self.segments, arrived, factor)
            return {BY_CLASS}
        forms = set()
        for each, (segment, gradient) in zip(kept, arrived, strict=True):
            weights, group = (
                out[segment.start : segment.start + gradient.numel()],
                optimizer.param_groups[segment.group],
            )
            forms.add(step_like(optimizer, group, gradient, each, weights, float(factor)))
        return forms

    def _made_in_one_pass(
        self, optimizer: torch.optim.Optimizer, old: ShardStates, arrived: Arrived, factor: float
    ) -> bool:
        """Whether a kernel has made the states; if not, some may be there, and some not."""
        before = [Kept(theirs.weights, old.optimizer.state.get(theirs.weights, {})) for theirs, _ in arrived]
        after = [Kept(mine.weights, optimizer.state.get(mine.weights, {})) for mine in self.segments]
        if not can_step_like(optimizer, (*before, *after)):
            return False
        for mine, kept, new, (_, gradient) in zip(self.segments, before, after, arrived, strict=True):
            part = slice(mine.start, mine.start + mine.weights.numel())
            weights = None if self.weights is None else self.weights[part]
            group = optimizer.param_groups[mine.group]
            if not step_out_of_place_like(optimizer, group, gradient, kept, new, weights, factor):
                return False
        return True


def can_copy(state: Mapping[str, Any] | None) -> bool:
    """Whether a parameter's state is there, and all of it can be copied."""
    kinds = (torch.Tensor, bool, int, float, type(None))
    return bool(state) and all(isinstance(value, kinds) for value in (state or {}).values())


def copied_small(value: Any) -> Any:
    """A state that is no tensor over elements, such as a count of steps."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def copy_state(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Have a parameter's state be that of another one, in its own memory as far as that goes."""
    for kind in [kind for kind in target if kind not in source]:
        del target[kind]
    for kind, value in source.items():
        mine = target.get(kind)
        same = isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape == value.shape
        if isinstance(mine, torch.Tensor) and same:
            mine.copy_(value)
        else:
            target[kind] = copied_small(value)
