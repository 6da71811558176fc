"""A copy of a model, and of its input, on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elixir.access.interception import Interception
from elixir.errors import InputError, InputTypeError, TraceError
from elixir.models.buffer_place import buffer_places
from elixir.models.casting import cast_dtype, casts_buffers
from elixir.models.plannable import refuse_unplannable
from elixir.models.step import with_tensors
from elixir.tracer.copied_functions import deep_copied

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(meta tensor, the tensor it stands for)"""


@dataclass(frozen=True)
class MetaCopy:
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


def meta_copy(model: nn.Module, dtype: torch.dtype | None) -> MetaCopy:
    """The model with every parameter and buffer on meta.

    The model itself is not touched, and no weight is copied. Floating parameters take `dtype`, and buffers with
    them where the model is cast as a whole (`casts_buffers`).
    A model that is all on meta in `dtype` already is its own twin: it holds nothing that a step could change.

    Raises:
        InputTypeError: `model` is no `nn.Module`.
        InputError: it has no parameters, or one that cannot be planned.
        TraceError: it holds something that cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"expected an nn.Module to trace, got {type(model).__name__}")
    places = {place.buffer: place for place in buffer_places(model)}
    buffers = list(places)
    original = _walk(model, [(buffer, buffer) for buffer in buffers])
    if not original.names:
        raise InputError(
            f"{type(model).__name__} has no parameters, so there is no step to plan; give the model itself"
        )
    refuse_unplannable(model, dtype)
    if all(_fits(parameter, dtype) for parameter in original.names) and all(buffer.is_meta for buffer in buffers):
        return original
    memo: dict[int, Any] = {}
    follow = casts_buffers(model, dtype)
    for parameter in original.names:
        cast = cast_dtype(parameter, dtype)
        data = torch.empty_strided(parameter.size(), parameter.stride(), dtype=cast, device="meta")
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        memo[id(parameter)].__class__ = type(parameter)
    for buffer, place in places.items():
        kept = place.cast(dtype if follow else None)
        memo[id(buffer)] = torch.empty_strided(buffer.size(), buffer.stride(), dtype=kept, device="meta")
    for module in original.modules:
        for value in vars(module).values():
            # Computed from a parameter by a pre-hook (torch.nn.utils.weight_norm), which computes it anew on the twin.
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        if next(module.parameters(), None) is None:
            memo |= dict.fromkeys(map(id, _of_a_plan(module)), _nothing)
    pairs = [(memo[id(buffer)], buffer) for buffer in buffers]
    try:
        twin = deep_copied(model, memo)
        for parameter in original.names:
            vars(memo[id(parameter)]).update(copy.deepcopy(vars(parameter), memo))
        _replace_in_scripts(original.modules, twin, memo)
        return _walk(twin, pairs)
    except Exception as error:
        raise TraceError(
            f"the model cannot be copied for tracing ({type(error).__name__}: {error}); keep locks, generators, "
            "process groups and tensors with a gradient history out of its attributes"
        ) from error


def _replace_in_scripts(originals: Iterable[nn.Module], twin: nn.Module, memo: dict[int, Any]) -> None:
    """Puts tensors on meta into TorchScript modules, whose copies know nothing of `memo`."""
    for before, after in zip(originals, dict.fromkeys(twin.modules()), strict=True):
        if isinstance(before, torch.jit.ScriptModule):
            for name, tensor in (*before._parameters.items(), *before._buffers.items()):
                after._c.setattr(name, memo[id(tensor)])  # type: ignore[operator, union-attr]


def _of_a_plan(module: nn.Module) -> list[Any]:
    """Hooks that a plan has attached to a module without weights, which may be part of several models.

    A model that runs under a plan cannot be copied, and is known by its weights; an activation is copied without this.
    """
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    own = [vars(module).get(name) for name in ("state_dict", "_save_to_state_dict", "_load_from_state_dict")]
    attached = [hook for hook in hooks if isinstance(getattr(hook, "__self__", None), Interception)]
    return attached + [method for method in own if method is not None]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces the hook."""


def meta_input(inp: Any, dtype: torch.dtype | None) -> tuple[Any, Pairs]:
    """The input, of any kind, with every tensor on meta, and what each stands for; floating ones take `dtype`."""
    pairs: Pairs = []

    def on_meta(item: torch.Tensor) -> torch.Tensor:
        if item.layout is not torch.strided or item.is_nested:
            raise InputError(f"inp holds a {'nested' if item.is_nested else item.layout} tensor; pass dense ones")
        cast = dtype if dtype is not None and item.is_floating_point() else item.dtype
        twin = torch.empty_strided(item.size(), item.stride(), dtype=cast, device="meta")
        twin.requires_grad_(item.requires_grad)
        pairs.append((twin, item))
        return twin

    return with_tensors(on_meta, inp), pairs


def _walk(model: nn.Module, buffers: Pairs) -> MetaCopy:
    modules: dict[nn.Module, str] = {}
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(module, prefix)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
    return MetaCopy(model, names, modules, buffers)


def _fits(parameter: nn.Parameter, dtype: torch.dtype | None) -> bool:
    return parameter.is_meta and parameter.grad is None and parameter.dtype == cast_dtype(parameter, dtype)
