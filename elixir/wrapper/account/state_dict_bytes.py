"""Bytes of the full state dicts that frameworks save between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from elixir.optimizer_states import MASTER_BYTES, MATRIX_STATES, family_of, state_size


def state_dict_bytes(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    only: Callable[[nn.Parameter], bool] | None = None,
) -> int:
    """Bytes of the full state dicts of a model, and of optimizers, as they are under a plan: in float32 or wider.

    Args:
        model: plain.
        optimizers: of the model, not stepped yet.
        only: whether a parameter is in the model's state dict.
    """
    total = 0
    for parameter in model.parameters():
        if only is None or only(parameter):
            size = parameter.element_size()
            total += parameter.numel() * (size if size == 1 else max(size, MASTER_BYTES))
    for optimizer in optimizers:
        try:
            states = state_size(family_of(optimizer))
        except ValueError:  # of whole matrices; all that cannot be planned for is refused later
            states = MATRIX_STATES
        for group in optimizer.param_groups:
            total += sum(states.nbytes(each.numel(), each.element_size()) for each in group["params"])
    return total
