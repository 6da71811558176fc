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

_Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


class _WithFormula(torch.autograd.Function):
    """An operator whose derivative is a formula of its input, its result and their gradient."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, operator: Any, formula: _Formula) -> torch.Tensor:
        with below_autograd():
            output: torch.Tensor = operator(input)
        ctx.save_for_backward(input, output)
        ctx.formula = formula
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, output = ctx.saved_tensors
        return ctx.formula(input, output, gradient), None, None


def _run(input: torch.Tensor, dtype: torch.dtype | None, operator: Any, formula: _Formula) -> torch.Tensor:
    cast = input if dtype is None else input.to(dtype)
    output: torch.Tensor = _WithFormula.apply(cast, operator, formula)  # type: ignore[no-untyped-call]
    return output


def _extreme(operator: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def of_input(input: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        mask = input == output
        zeros = torch.zeros_like(input)
        return zeros.masked_fill_(mask, gradient / mask.sum())

    return lambda input: _run(input, None, operator, of_input)


def _cumprod(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    def of_input(input: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        weighted = output * gradient
        is_zero = input == 0
        found = _reversed_cumsum(weighted, dim).div(input)
        del is_zero  # it is alive while the gradient is computed
        return found

    return _run(self, dtype, lambda input: aten.cumprod(input, dim), of_input)


def _reversed_cumsum(weighted: torch.Tensor, dim: int) -> torch.Tensor:
    flipped = weighted.flip(dim)
    summed = flipped.cumsum(dim)
    return summed.flip(dim)  # both operands are alive, as temporaries of one expression in C++


def _product(dim: int | None, operator: Any) -> Callable[..., torch.Tensor]:
    def of_input(input: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if dim is not None and output.dim() < input.dim():
            gradient, output = gradient.unsqueeze(dim), output.unsqueeze(dim)
        is_zero = input == 0
        counts = is_zero.sum(() if dim is None else dim, keepdim=True)
        found = gradient * (output / input)
        del is_zero, counts  # they are alive while the gradient is computed
        return found

    return lambda input, dtype: _run(input, dtype, operator, of_input)


def _prod(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _product(None, aten.prod)(self, dtype)


def _prod_dim(self: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    whole = keepdim or not self.dim()
    return _product(None if whole else dim, lambda input: aten.prod(input, dim, keepdim))(self, dtype)
