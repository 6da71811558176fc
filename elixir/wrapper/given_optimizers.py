"""The optimizers that a caller gives with a model: whether they fit it, and of which families they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.kernels.muon import matrix_rule
from elixir.optimizer_states import family_of, moments_of
from elixir.wrapper.module import ElixirModule, refuse_wrapped


def check_given(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers as a list, or raises if they and the model cannot be wrapped."""
    if not isinstance(model, nn.Module) or isinstance(model, ElixirModule):
        raise InputTypeError(f"model must be a plain nn.Module, got {type(model).__name__}")
    refuse_wrapped(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(optimizers, Sequence) or not optimizers:
        raise InputTypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    own = set(model.parameters())
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise InputTypeError(f"optimizer must be a torch optimizer, got {type(each).__name__}")
        foreign = sum(parameter not in own for group in each.param_groups for parameter in group["params"])
        if foreign:
            raise InputError(
                f"{foreign} parameters of the optimizer are not the model's; make it over model.parameters() of this "
                "very model"
            )
    return list(optimizers)


class Families(NamedTuple):
    """Optimizers as a search takes them; see `elixir.search.request.SearchRequest`."""

    optimizer_type: str
    matrices: tuple[str, ...] | None
    """Names of the parameters that are stepped as whole matrices; None if there are none."""
    moments: str
    """Kind of the moments."""
    elementwise: list[torch.optim.Optimizer]
    """The optimizers that step the others."""


def families_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], moments: str | None = None) -> Families:
    """The families of optimizers: one of whole matrices, such as Muon, and one of single elements, at most.

    Args:
        model: whose parameters they step.
        optimizers: one or several.
        moments: their kind, as it was asked for (`elixir.optimizer_states.moments_of`).

    Raises:
        InputError: there are others, or several kinds of moments.
    """
    whole = [each for each in optimizers if matrix_rule(each) is not None]
    others = [each for each in optimizers if matrix_rule(each) is None]
    families = {family_of(each) for each in others}
    if len(families) > 1:
        raise InputError(
            f"one plan counts the states of one family of optimizers, and of matrices, found {sorted(families)}; use "
            "one class for all parameters, or torch.optim.Muon for matrices"
        )
    kinds = {moments_of(each, moments) for each in others or whole}
    if len(kinds) > 1:
        raise InputError(f"one plan keeps all moments alike, found {sorted(kinds)}; use one kind for all parameters")
    kind = kinds.pop()
    if not whole:
        return Families(families.pop(), None, kind, others)
    taken = {parameter for each in whole for group in each.param_groups for parameter in group["params"]}
    names = tuple(
        name for name, parameter in model.named_parameters() if parameter in taken and parameter.requires_grad
    )
    first = next(rule.family for each in whole if (rule := matrix_rule(each)) is not None)
    return Families(f"{first} + {families.pop()}" if families else first, names, kind, others)
