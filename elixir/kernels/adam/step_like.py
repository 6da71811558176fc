"""Steps on the host with the bits of an optimizer that keeps its own states: torch's fused Adams, and `HybridAdam`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from elixir.errors import InputError
from elixir.kernels.adam.adam_rule import group_options
from elixir.kernels.adam.hybrid_adam import HybridAdam, flat
from elixir.kernels.adam.moments import MasterStates, Moments
from elixir.kernels.adam.step import adam_step, adam_step_out_of_place


class Kept(NamedTuple):
    """A float32 parameter on the host and its optimizer state."""

    weights: torch.Tensor
    state: dict[str, Any]


def step_like(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    gradient: torch.Tensor,
    kept: Kept,
    weight_out: torch.Tensor | None,
    factor: float,
    into: Kept | None = None,
) -> str:
    """The next step of one parameter as `optimizer` makes it, but in one pass over memory: what it would widen,
    multiply and round for a whole parameter is done for pieces that fit a cache.

    Args:
        optimizer: one with which `can_step_like`.
        group: the parameter's options.
        gradient: on the host, any floating dtype.
        kept: the parameter and its state; updated if `into` is None, otherwise left as it is.
        weight_out: flat; takes the new weights in its dtype.
        factor: the gradient is multiplied by it first.
        into: takes the new parameter and state.

    Returns:
        The form of the step; see `adam_step` and `adam_step_out_of_place`.
    """
    options = group_options(group, decoupled=isinstance(optimizer, torch.optim.AdamW))
    old, number = _states(kept), int(kept.state["step"]) + 1
    if into is not None:
        into.state["step"].fill_(number)
        return adam_step_out_of_place(gradient.view(-1), old, _states(into), weight_out, options, number, factor)
    kept.state["step"] += 1
    return adam_step(gradient.view(-1), old.master, weight_out, old.moments, options, number, factor)


def can_step_like(optimizer: torch.optim.Optimizer, every: Iterable[Kept]) -> bool:
    """Whether the step of `optimizer` is known here: `HybridAdam`, or one of torch's Adams with ``fused=True``, whose
    moments are there in float32, with options in their usual ranges. Others round in other places.

    Args:
        optimizer: any.
        every: the parameters that are to be stepped.
    """
    hybrid, decoupled = type(optimizer) is HybridAdam, isinstance(optimizer, torch.optim.AdamW)
    if not hybrid and type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    refused = ("amsgrad", "differentiable", "capturable")
    for group in optimizer.param_groups:
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        if not (hybrid or group.get("fused")) or any(group.get(name) for name in refused):
            return False
        if not all(isinstance(value, int | float) for value in numbers):
            return False
        try:
            group_options(group, decoupled=decoupled)
        except InputError:  # the class steps with values such as a negative rate, too
            return False
    # Before its first step a class has no moments, and loaded ones may be of any dtype.
    return all(
        isinstance(moment, torch.Tensor) and moment.dtype == kept.weights.dtype == torch.float32
        for kept in every
        for moment in (kept.state.get("exp_avg"), kept.state.get("exp_avg_sq"))
    )


def _states(kept: Kept) -> MasterStates:
    moments = Moments("float32", flat(kept.state["exp_avg"]), flat(kept.state["exp_avg_sq"]))
    return MasterStates(flat(kept.weights), moments)
