"""Derivatives that PyTorch takes in a quicker way once it has looked at values, which on meta it cannot.

A trace supposes the usual case: no factor of a product is zero, no largest value is NaN. Source: `prod_backward`,
`cumprod_backward`, `evenly_distribute_backward` in `FunctionsManual.cpp`.

Anomaly detection looks at every gradient (`Engine::evaluate_function` in `engine.cpp`). A NaN would end the step there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from elixir.torch_private import below_autograd

aten = torch.ops.aten


def kernels(kind: str) -> dict[str, Callable[..., Any]]:
    """Name in `aten` -> what a device of a kind (``cuda`` or ``cpu``) does for it."""
    found: dict[str, Callable[..., Any]] = {"cumprod": _cumprod, "prod": _prod, "prod.dim_int": _prod_dim}
    if kind == "cpu":  # on CUDA the derivative reads no values
        found |= {name: _extreme(getattr(aten, name).default) for name in ("max", "min", "median")}
    return found


def asks_for_nan(made_by: Any, depth: int) -> bool:
    """Whether a number that is read out is the answer of anomaly detection, which raises if a gradient has a NaN.

    Args:
        made_by: the operator that made the number.
        depth: how many Python frames lie between this call and `__torch_dispatch__`, itself included.
    """
    by_engine = sys._getframe(depth + 1).f_code.co_name == "_engine_run_backward"
    return by_engine and made_by is aten._is_any_true.default


class _Cumprod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dim: int) -> torch.Tensor:
        with below_autograd():
            output: torch.Tensor = aten.cumprod(input, dim)
        ctx.save_for_backward(input, output)
        ctx.dim = dim
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, output = ctx.saved_tensors
        weighted = output * gradient
        is_zero = input == 0
        of_input = _reversed_cumsum(weighted, ctx.dim).div(input)
        del is_zero, weighted  # they are alive while the gradient is computed
        return of_input, None


def _reversed_cumsum(weighted: torch.Tensor, dim: int) -> torch.Tensor:
    flipped = weighted.flip(dim)
    summed = flipped.cumsum(dim)
    return summed.flip(dim)  # both operands are alive, as temporaries of one expression in C++


class _Prod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        with below_autograd():
            output: torch.Tensor = aten.prod(input) if dim is None else aten.prod(input, dim, keepdim)
        ctx.save_for_backward(input, output)
        ctx.dim = None if dim is None or keepdim or not input.dim() else dim
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, output = ctx.saved_tensors
        if ctx.dim is not None:
            gradient, output = gradient.unsqueeze(ctx.dim), output.unsqueeze(ctx.dim)
        is_zero = input == 0
        counts = is_zero.sum(() if ctx.dim is None else ctx.dim, keepdim=True)
        of_input = gradient * (output / input)
        del is_zero, counts  # they are alive while the gradient is computed
        return of_input, None, None


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, operator: Any) -> torch.Tensor:
        with below_autograd():
            output: torch.Tensor = operator(input)
        ctx.save_for_backward(input, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, output = ctx.saved_tensors
        mask = input == output
        of_input = torch.zeros_like(input)
        return of_input.masked_fill_(mask, gradient / mask.sum()), None


def _extreme(operator: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(self: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Extreme.apply(self, operator)  # type: ignore[no-untyped-call]
        return output

    return run


def _cumprod(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    output: torch.Tensor = _Cumprod.apply(self if dtype is None else self.to(dtype), dim)  # type: ignore[no-untyped-call]
    return output


def _prod(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    output: torch.Tensor = _Prod.apply(self if dtype is None else self.to(dtype), None, False)  # type: ignore[no-untyped-call]
    return output


def _prod_dim(self: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    output: torch.Tensor = _Prod.apply(self if dtype is None else self.to(dtype), dim, keepdim)  # type: ignore[no-untyped-call]
    return output
