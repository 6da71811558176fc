"""`CountedParameter`: a parameter that lies where plain PyTorch has it, whose writes through ``data`` are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError

GRADIENT: Any = torch.Tensor.grad
DATA: Any = torch.Tensor.data
"""PyTorch's own descriptors, which classes of parameters replace."""


def plain_copy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copies a parameter to an ordinary one with the same values, once for each `memo`."""
    if id(parameter) not in memo:
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    copied: nn.Parameter = memo[id(parameter)]
    return copied


def _is_read_to_clip(reader: FrameType | None) -> bool:
    """Whether a function of torch that clips reads a gradient, itself or from a generator such as
    ``get_total_norm(p.grad for p in parameters)``."""
    if reader is not None and reader.f_code.co_name == "<genexpr>":
        reader = reader.f_back
    return reader is not None and reader.f_globals.get("__name__") == nn.utils.clip_grad.__name__


class CountedParameter(nn.Parameter):
    """A parameter whose ``data`` is read through a function, so that writes through it can be counted.

    It has no torch function, so only reads of ``data`` and ``grad`` cost anything.
    """

    elixir_lends: Callable[[torch.Tensor], torch.Tensor] | None = None
    elixir_gradient_is_scaled = False
    """Whether gradients carry a loss scale until the step."""

    def _read_gradient(self) -> torch.Tensor | None:
        """The gradient. Functions of torch that clip gradients would compare their limit with scaled ones."""
        gradient: torch.Tensor | None = GRADIENT.__get__(self)
        if self.elixir_gradient_is_scaled and gradient is not None and _is_read_to_clip(sys._getframe(1)):
            raise InputError(
                "in float16 gradients carry the loss scale until step(), so functions of torch.nn.utils would clip "
                "them to a limit that is too low by that factor; clip with max_norm= or model.clip_grad_norm_(), "
                "which gives the norm without it"
            )
        return gradient

    grad = property(_read_gradient, GRADIENT.__set__, GRADIENT.__delete__)

    @property
    def data(self) -> torch.Tensor:
        """The values, without a graph."""
        if torch.compiler.is_compiling():
            return self.detach()
        data: torch.Tensor = DATA.__get__(self)
        return data if self.elixir_lends is None else self.elixir_lends(data)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Returns an ordinary parameter with the same values."""
        return plain_copy(self, memo)
