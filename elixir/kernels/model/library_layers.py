"""Layers of models by kernels of NVIDIA Apex (source build of 2025) and xformers (0.0.2x): a table, one row each.

A module takes a kernel if its class computes what the kernel computes: its forward is run once on a few numbers, with
stand-ins for what it holds. Gemma's norm, which multiplies by one plus its weight, is left alone that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from elixir.access.interception import untrack


class Row(NamedTuple):
    """One kernel of a library."""

    kind: str
    library: str
    modules: tuple[str, ...]
    """Files that are imported; the last has the function."""
    function: str
    fits: Callable[[Any], bool]
    """Whether a module computes what the kernel does."""
    arguments: Callable[[Any], Iterable[Any]]
    """The arguments of the kernel after the input, of a module."""


def forward_of(row: Row, module: nn.Module, kernel: Callable[..., Any]) -> Any:
    """A forward for the module that runs the kernel; None if it computes something else."""
    try:
        with torch.no_grad():
            if not row.fits(module):
                return None
    except Exception:  # stand-ins lack what other forwards need
        return None
    plain = type(module).forward

    @wraps(plain)
    def forward(self: Any, x: torch.Tensor) -> Any:
        if any(weight.dtype != x.dtype for weight in self.parameters()):  # families differ in that of the result
            return plain(self, x)
        return kernel(x, *(_present(each) if isinstance(each, nn.Parameter) else each for each in row.arguments(self)))

    return MethodType(forward, module)


def _present(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's present memory as an ordinary tensor that leads gradients to it, until the running module
    returns. A library's kernel is no torch function, and would not be seen reading a parameter that is elsewhere."""
    view = parameter.view_as(parameter)
    untrack([view])
    return view


def _numbers(*shape: int, seed: float) -> torch.Tensor:
    """Numbers without a pattern that a wrong formula could fit; no random generator is touched."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device="cpu").square().mul(seed).sin().view(shape)


def _is_rms_norm(module: Any) -> bool:
    x, weight = _numbers(3, 4, seed=1.0), _numbers(4, seed=0.7)
    found = type(module).forward(SimpleNamespace(weight=weight, variance_epsilon=0.1), x)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    return len(list(module.parameters())) == 1 and bool(torch.allclose(found, expected, rtol=1e-5, atol=1e-5))


def _is_layer_norm(module: Any) -> bool:
    return type(module) is nn.LayerNorm and module.bias is not None


def _is_swiglu(module: Any) -> bool:
    # The layers are not called, so what is more than a linear layer, or is listened to, would be left out.
    layers = [getattr(module, name) for name in _PROJECTIONS]
    if any(type(each) is not nn.Linear or each._forward_hooks or each._forward_pre_hooks for each in layers):
        return False
    x, (a, b, c) = _numbers(3, 4, seed=1.0), (_numbers(4, 4, seed=seed) for seed in (0.3, 0.5, 0.9))
    holds = dict(zip(_PROJECTIONS, (lambda y: y @ a, lambda y: y @ b, lambda y: y @ c), strict=True))
    found = type(module).forward(SimpleNamespace(**holds, act_fn=module.act_fn), x)
    return bool(torch.allclose(found, (nn.functional.silu(x @ a) * (x @ b)) @ c, rtol=1e-5, atol=1e-5))


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("fused_layer_norm_cuda", "apex.normalization.fused_layer_norm")
"""The extension is imported first: Apex itself looks for it at the first call only."""
ROWS = (
    Row("rms_norm", "apex", _NORMS, "fused_rms_norm_affine", _is_rms_norm,
        lambda module: (module.weight, module.weight.shape, module.variance_epsilon)),
    Row("layer_norm", "apex", _NORMS, "fused_layer_norm_affine", _is_layer_norm,
        lambda module: (module.weight, module.bias, module.normalized_shape, module.eps)),
    Row("swiglu", "xformers", ("xformers.ops",), "swiglu", _is_swiglu,
        lambda module: (getattr(getattr(module, name), key) for name in _PROJECTIONS for key in ("weight", "bias"))),
)  # fmt: skip
