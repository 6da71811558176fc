"""RMS norm and the SwiGLU product in plain PyTorch, keeping for backward only what cannot be worked out anew.

Hugging Face's forms keep every intermediate result: RMS norm a float32 copy of its input and the normalised value,
SwiGLU the activated gate. These keep the input and one number per row, and the two factors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

from elixir.access.interception import untrack
from elixir.errors import InputError

Gradients = tuple[torch.Tensor | None, ...]


def once_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A backward that refuses to be differentiated.

    `torch.autograd.function.once_differentiable` does so only where the incoming gradient depends on something, not
    where the saved tensors do: a gradient penalty would silently be left out.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True needs a second derivative, which fused kernels do not have; choose 'plain' for "
                "rms_norm, swiglu and cross_entropy in use_fused_kernels, or leave it out"
            )
        return backward(ctx, *gradients)

    return checked


def scaled_in_place(output: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """A product in the memory of its first factor. Compiled, where that saves none, it has a memory for itself.

    PyTorch 2.11 compiles a function that returns what it has changed in place without its gradient.
    """
    return output * by if torch.compiler.is_compiling() else output.mul_(by)


def present_values(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's memory as an ordinary tensor without a graph, for a kernel that reads it often: it reports one use.

    Valid until the module that runs now returns.
    """
    values = parameter.detach()
    untrack([values])
    return values


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        present = present_values(weight)
        wide = x.to(wide_dtype(x.dtype))
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        output = scaled_in_place((wide * inverse).to(x.dtype), present)
        ctx.save_for_backward(x, weight, inverse)
        return output

    @staticmethod
    @once_only
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        x, weight, inverse = ctx.saved_tensors
        gradient = gradient.to(inverse.dtype)
        normalised = x.to(inverse.dtype) * inverse
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normalised).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            scaled = gradient * weight
            along = (scaled * normalised).mean(-1, keepdim=True)
            of_x = scaled.sub_(normalised.mul_(along)).mul_(inverse).to(x.dtype)
        return of_x, of_weight, None


class _OutlineRmsNorm(torch.autograd.Function):
    """The allocations of a fused kernel, without arithmetic: for traces on meta."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        present_values(weight)  # announces the use
        inverse = torch.empty((*x.shape[:-1], 1), dtype=wide_dtype(x.dtype), device=x.device)
        ctx.save_for_backward(x, weight, inverse)
        return torch.empty_like(x)

    @staticmethod
    @once_only
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        _, weight, _ = ctx.saved_tensors
        return torch.empty_like(gradient), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return scaled_in_place(F.silu(gate), up)

    @staticmethod
    @once_only
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        gate, up = ctx.saved_tensors
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate) if ctx.needs_input_grad[0] else None
        of_up = F.silu(gate).mul_(gradient) if ctx.needs_input_grad[1] else None
        return of_gate, of_up


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension, which `weight` has; computed in float32.

    Rounds to the dtype of `x` before it multiplies by `weight`, as Llama does: forward gives the bits of that. `x` and
    `weight` are of one dtype.
    """
    if x.requires_grad or weight.requires_grad:
        output: torch.Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return output
    wide = x.to(wide_dtype(x.dtype))
    return (wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype) * weight


def outline_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """On meta, the memory of a fused RMS norm: it keeps its input and a number per row."""
    output: torch.Tensor = _OutlineRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return output


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """PyTorch's own, which on CUDA is one kernel forward and one or two backward.

    Elsewhere, meta included, PyTorch composes it of operators that keep as much as the plain form does. On meta this is
    the outline of the kernel; in a graph for a compiler, its operator.
    """
    if not x.is_meta:
        return F.rms_norm(x, weight.shape, weight, eps)
    if not torch.compiler.is_compiling():
        return outline_rms_norm(x, weight, eps)
    output: torch.Tensor = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)[0]
    return output


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, elementwise, of one dtype; forward gives the bits of the two operators."""
    output: torch.Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return output


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
