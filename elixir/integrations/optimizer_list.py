"""`OptimizerList`: several optimizers of one model as one, for frameworks that know one."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elixir.errors import InputError


class OptimizerList(torch.optim.Optimizer):
    """Muon for matrices and AdamW for all else, or others, as one optimizer; with or without a plan.

    Its groups are those of all, so that a scheduler sets the rates of all.

    Args:
        optimizers: plain ones, or all `ElixirOptimizer` of one module.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__(self.param_groups, {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all as they are now: torch replaces them when states are loaded."""
        return [group for each in self.optimizers for group in each.param_groups]

    @param_groups.setter
    def param_groups(self, groups: object) -> None:
        """Ignores the empty groups that the base class sets."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Does nothing with the groups there are, which the base class adds.

        Raises:
            InputError: it is another one.
        """
        if not any(param_group is group for group in self.param_groups):
            raise InputError("an OptimizerList takes no groups; give them to one of its optimizers before it is made")

    @property
    def state(self) -> Any:
        """The states of all, as each shows its own."""
        return ChainMap(*(each.state for each in self.optimizers))

    @state.setter
    def state(self, state: object) -> None:
        """Ignores the empty states that the base class sets."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether an `ElixirOptimizer` left out its last step, because float16 gradients overflowed."""
        return any(getattr(each, "step_was_skipped", False) for each in self.optimizers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all, one after the other; returns the result of `closure`, or None."""
        result = None if closure is None else torch.enable_grad()(closure)()
        for each in self.optimizers:
            each.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls `zero_grad` of all, one after the other."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self, **how: Any) -> dict[str, Any]:
        """The state dicts of all, in order.

        Args:
            how: arguments of `ElixirOptimizer.state_dict`.
        """
        return {"optimizers": [each.state_dict(**how) for each in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, into as many optimizers."""
        for each, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            each.load_state_dict(state)


def as_one(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The only optimizer, or a list of several."""
    return optimizers[0] if len(optimizers) == 1 else OptimizerList(optimizers)


def as_several(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[Any]:
    """One optimizer, several, or an `OptimizerList`, as a list."""
    several = optimizer.optimizers if isinstance(optimizer, OptimizerList) else optimizer
    return list(several) if isinstance(several, Sequence) else [several]
