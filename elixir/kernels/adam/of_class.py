"""Steps on the host with the bits of an optimizer that keeps its own states: torch's fused Adams, and `HybridAdam`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from elixir.errors import InputError
from elixir.kernels.adam.eager import IN_PIECES
from elixir.kernels.adam.hybrid import HybridAdam, flat
from elixir.kernels.adam.moments import Moments, States
from elixir.kernels.adam.rule import group_options
from elixir.kernels.adam.step import adam_step
from elixir.kernels.adam.when_compiled import combination_of, kernel_for


class Kept(NamedTuple):
    """A parameter, float32 and on the host, and what its optimizer keeps of it."""

    weights: torch.Tensor
    state: dict[str, Any]


def step_out_of_place_like(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    gradient: torch.Tensor,
    old: Kept,
    new: Kept,
    weight_out: torch.Tensor | None,
    factor: float,
) -> bool:
    """Make of a parameter, in `new`, what the next step of `optimizer` would; `old` is left as it is.

    Args:
        optimizer: one with which `can_step_like`.
        group: the parameter's options.
        gradient: on the host, any floating dtype.
        old: the parameter, float32 and on the host, and its state.
        new: takes the new ones.
        weight_out: flat; takes the new weights in its dtype.
        factor: the gradient is multiplied by it first.

    Returns:
        Whether it was done. Not where no kernel is there (yet) that has the bits of that class: nothing is written.
    """
    numel = old.weights.numel()
    before, after = (States(flat(kept.weights), _moments(kept)) for kept in (old, new))
    kernel = kernel_for(combination_of(gradient, before.master, weight_out, before.moments))
    if kernel is None:
        return False
    options = group_options(group, decoupled=isinstance(optimizer, torch.optim.AdamW))
    number = int(old.state["step"]) + 1
    if numel:
        kernel(gradient.view(-1), before, after, weight_out, options, number, factor, 0)
    new.state["step"].fill_(number)
    return True


def step_like(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    gradient: torch.Tensor,
    kept: Kept,
    weight_out: torch.Tensor | None,
    factor: float,
) -> str:
    """The next step of one parameter as `optimizer` makes it, but in one pass over memory: what it would widen,
    multiply and round for a whole parameter is done for pieces that fit a cache.

    Args:
        optimizer: one with which `can_step_like`.
        group: the parameter's options.
        gradient: on the host, any floating dtype.
        kept: the parameter and its state; updated.
        weight_out: flat; takes the new weights in its dtype.
        factor: the gradient is multiplied by it first.

    Returns:
        The form of the step; see `adam_step`.
    """
    options = group_options(group, decoupled=isinstance(optimizer, torch.optim.AdamW))
    kept.state["step"] += 1
    number, numel = int(kept.state["step"]), gradient.numel()
    if not numel:
        return IN_PIECES
    return adam_step(gradient.view(-1), flat(kept.weights), weight_out, _moments(kept), options, number, factor)


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
        except InputError:  # such as a negative rate at the end of a schedule, with which the class steps
            return False
    # Before its first step a class has no moments, and loaded ones may be of any dtype.
    return all(
        isinstance(moment, torch.Tensor) and moment.dtype == kept.weights.dtype == torch.float32
        for kept in every
        for moment in (kept.state.get("exp_avg"), kept.state.get("exp_avg_sq"))
    )


def _moments(kept: Kept) -> Moments:
    return Moments("float32", flat(kept.state["exp_avg"]), flat(kept.state["exp_avg_sq"]))
