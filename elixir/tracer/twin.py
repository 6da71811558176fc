"""A copy of a model, and of its input, on the meta device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from elixir.errors import InputError, InputTypeError, TraceError

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(meta tensor, the tensor it stands for)"""


@dataclass(frozen=True)
class Twin:
    """A model on meta, walked once."""

    model: nn.Module
    names: dict[nn.Parameter, list[str]]
    """All names of each parameter, in the order of `named_parameters`."""
    modules: dict[nn.Module, str]
    """The name of each module."""
    buffers: Pairs

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Each parameter once, in order; positions in this list are the indices of a `StepTrace`."""
        return list(self.names)


def meta_twin(model: nn.Module, dtype: torch.dtype | None) -> Twin:
    """The model with every parameter and buffer on meta.

    The model itself is not touched, and no weight is copied. Floating parameters take `dtype`; buffers keep theirs.
    A model that is all on meta in `dtype` already is its own twin: it holds nothing that a step could change.

    Raises:
        InputTypeError: `model` is no `nn.Module`.
        InputError: nothing in it is trainable.
        TraceError: it holds something that cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"expected an nn.Module to trace, got {type(model).__name__}")
    buffers = list(model.buffers())
    original = _walk(model, [(buffer, buffer) for buffer in buffers])
    if not any(parameter.requires_grad for parameter in original.names):
        raise InputError("the model has no trainable parameter, so there is no training step to trace")
    if all(_fits(parameter, dtype) for parameter in original.names) and all(buffer.is_meta for buffer in buffers):
        return original
    memo: dict[int, Any] = {}
    for parameter in original.names:
        cast = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        data = torch.empty_strided(parameter.size(), parameter.stride(), dtype=cast, device="meta")
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in buffers:
        memo[id(buffer)] = torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device="meta")
    for module in original.modules:
        for value in vars(module).values():
            # Computed from a parameter by a pre-hook (torch.nn.utils.weight_norm), which computes it anew on the twin.
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    pairs = [(memo[id(buffer)], buffer) for buffer in buffers]
    try:
        return _walk(copy.deepcopy(model, memo), pairs)
    except Exception as error:
        raise TraceError(
            f"the model cannot be copied for tracing ({type(error).__name__}: {error}); keep locks, generators, "
            "process groups and tensors with a gradient history out of its attributes"
        ) from error


def meta_input(inp: Any, dtype: torch.dtype | None) -> tuple[dict[Any, Any], Pairs]:
    """The input with every tensor on meta, and what each stands for; floating ones take `dtype`.

    Raises:
        InputTypeError: `inp` is no dict.
    """
    if not isinstance(inp, dict):
        raise InputTypeError(f"inp must be a dict of what step_fn needs, got {type(inp).__name__}")
    pairs: Pairs = []

    def on_meta(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if item.layout is not torch.strided or item.is_nested:
            raise InputError(f"inp holds a {'nested' if item.is_nested else item.layout} tensor; pass dense ones")
        cast = dtype if dtype is not None and item.is_floating_point() else item.dtype
        twin = torch.empty_strided(item.size(), item.stride(), dtype=cast, device="meta")
        twin.requires_grad_(item.requires_grad)
        pairs.append((twin, item))
        return twin

    return tree_map(on_meta, inp), pairs


def _walk(model: nn.Module, buffers: Pairs) -> Twin:
    modules: dict[nn.Module, str] = {}
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(module, prefix)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
    return Twin(model, names, modules, buffers)


def _fits(parameter: nn.Parameter, dtype: torch.dtype | None) -> bool:
    cast = dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype
    return parameter.is_meta and parameter.grad is None and not cast
