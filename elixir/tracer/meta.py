"""The user's own model with its tensors on the meta device for the time of a trace, and its input on meta.

The tensors change in place: each parameter and buffer stays the object that it is, and its memory is exchanged for
memory on meta, which holds nothing. So whatever holds a layer or a weight (a closure, a hook, a tied name, a
parametrization) traces the same tensors, and no weight is copied.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from elixir.access.interception import TrackedParameter
from elixir.errors import InputError, InputTypeError, TraceError
from elixir.models.model_tensors import buffer_places, cast_dtype, casts_buffers
from elixir.models.plannable import refuse_unplannable
from elixir.models.step import with_tensors
from elixir.torch_private import swap_tensors
from elixir.tracer.user_objects import uninterrupted

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(meta tensor, the tensor it stands for)"""


@dataclass(frozen=True)
class TracedModel:
    """A model whose tensors are on meta, walked once."""

    model: nn.Module
    names: dict[nn.Parameter, list[str]]
    """All names of each parameter, in the order of `named_parameters`."""
    modules: dict[nn.Module, str]
    """The name of each module."""
    buffers: Pairs

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Each parameter once, in order; positions in this list are the indices of a `StepTrace`."""
        return list(self.names)


@contextlib.contextmanager
def on_meta(model: nn.Module, dtype: torch.dtype | None) -> Iterator[TracedModel]:
    """Puts every parameter and buffer of a model on meta while it is open, and the same memory back afterwards.

    Floating parameters take `dtype`, and buffers with them where the model is cast as a whole (`casts_buffers`).
    Gradients and hooks of the parameters are not seen meanwhile; these and attributes are the same afterwards. A model
    that is all on meta in `dtype` already stays as it is, hooks included.

    Raises:
        InputTypeError: `model` is no `nn.Module`.
        InputError: it has no parameters, or one that cannot be planned.
        TraceError: the model runs under a plan, or something else in PyTorch refers to the memory of a tensor.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"expected an nn.Module to trace, got {type(model).__name__}")
    places = {place.buffer: place for place in buffer_places(model)}
    modules, names = _walk(model)
    if not names:
        raise InputError(
            f"{type(model).__name__} has no parameters, so there is no step to plan; give the model itself"
        )
    refuse_unplannable(model, dtype)
    if any(isinstance(parameter, TrackedParameter) for parameter in names):
        raise TraceError(
            "the model runs under a plan and cannot be traced meanwhile; close() it first, or trace another"
        )
    dtypes: dict[torch.Tensor, torch.dtype] = {parameter: cast_dtype(parameter, dtype) for parameter in names}
    if all(_fits(*pair) for pair in dtypes.items()) and all(buffer.is_meta for buffer in places):
        yield TracedModel(model, names, modules, [(buffer, buffer) for buffer in places])
        return
    _refuse_profiled()
    follow = casts_buffers(model, dtype)
    dtypes |= {buffer: place.cast(dtype if follow else None) for buffer, place in places.items()}
    swaps = {tensor: _Swap.planned(tensor, kept) for tensor, kept in dtypes.items()}
    scripts = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    held = [(module, [*module._parameters.items(), *module._buffers.items()]) for module in scripts]
    computed = [
        (vars(module), name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    restoring: list[Callable[[], object]] = [partial(_back, swap, modules) for swap in swaps.values()]
    restoring += [partial(_replace_in_scripts, held)]
    restoring += [partial(at.__setitem__, name, value) for at, name, value in computed]
    try:
        for swap in swaps.values():
            swap.to_meta()
        for at, name, value in computed:
            # From weights, as by `torch.nn.utils.weight_norm`; the graph keeps real ones.
            at[name] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        _replace_in_scripts(held)
        yield TracedModel(model, names, modules, [(buffer, swaps[buffer].other) for buffer in places])
    finally:
        uninterrupted(restoring)


def _refuse_profiled() -> None:
    """Refuses a trace under a profiler that refers to each tensor it sees: no memory could be exchanged back."""
    tensor, other = (torch.empty(1, device="meta") for _ in range(2))
    tensor.add(1)
    try:
        swap_tensors(tensor, other)
    except RuntimeError as error:
        raise TraceError(
            f"a profiler refers to the tensors that it sees ({error}); trace outside of torch.profiler, or without "
            "record_shapes"
        ) from error


def _back(swap: _Swap, modules: Iterable[nn.Module]) -> None:
    """Gives a tensor its memory again; if a profiler that the step has opened refers to it for good, modules get the
    real tensor in its place."""
    try:
        swap.back()
    except RuntimeError:
        gc.collect()
        try:
            swap.back()
        except RuntimeError as error:
            real: Any = swap.real()
            for module in modules:
                for held in (module._parameters, module._buffers):
                    held.update({name: real for name, tensor in held.items() if tensor is swap.tensor})
            raise TraceError(
                f"something that the step leaves refers to the memory of a weight ({error}), so the model has "
                "other parameter objects now; keep profilers out of step_fn and make the optimizer anew"
            ) from error


class _Swap(NamedTuple):
    """A tensor of the model and one with the memory that it is exchanged for."""

    tensor: torch.Tensor
    other: torch.Tensor
    """Holds the memory on meta before and after, the real memory meanwhile."""
    memory: int
    """Identity of the real memory, by which it is known who has it."""
    kind: type
    attributes: dict[str, Any]
    hooks: tuple[Any, Any]

    @classmethod
    def planned(cls, tensor: torch.Tensor, dtype: torch.dtype) -> _Swap:
        """Exchanges nothing yet."""
        other = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
        if tensor.is_leaf:  # weights of models from `torch.jit.load` are no `nn.Parameter`s
            other.requires_grad_(tensor.requires_grad)
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        return cls(tensor, other, tensor._cdata, type(tensor), dict(vars(tensor)), hooks)

    def to_meta(self) -> None:
        """The tensor is on meta. Its gradient goes with the real memory; hooks of others are not called meanwhile."""
        try:
            swap_tensors(self.tensor, self.other)
        except RuntimeError as error:
            raise TraceError(
                f"a tensor of shape {tuple(self.tensor.shape)} cannot be put on meta ({error}); trace outside of "
                "torch.autocast, whose cache refers to weights, and delete results of a profiler that recorded shapes"
            ) from error
        self._set_hooks((None, None))

    def back(self) -> None:
        """The tensor has its memory again; nothing happens if it has."""
        if self.tensor._cdata != self.memory:
            self._set_hooks((None, None))  # otherwise PyTorch would take those of a step for the real tensor's
            swap_tensors(self.tensor, self.other)
            self._set_hooks(self.hooks)
        if type(self.tensor) is not self.kind:  # an interrupt has left a class that announces uses
            self.tensor.__class__ = self.kind
        held = vars(self.tensor)
        if held or self.attributes:
            held.clear()
            held.update(self.attributes)

    def real(self) -> torch.Tensor:
        """The object with the real memory, as a part of the model."""
        self.other.__class__ = self.kind
        vars(self.other).update(self.attributes)
        return self.other

    def _set_hooks(self, hooks: tuple[Any, Any]) -> None:
        if self.tensor._backward_hooks is not hooks[0]:
            self.tensor._backward_hooks = hooks[0]
        if self.tensor._post_accumulate_grad_hooks is not hooks[1]:
            self.tensor._post_accumulate_grad_hooks = hooks[1]


def _replace_in_scripts(held: list[tuple[torch.jit.ScriptModule, list[tuple[str, Any]]]]) -> None:
    """Gives TorchScript modules, which refer to memory and not to objects, the memory that their tensors have now."""
    for module, tensors in held:
        for name, tensor in tensors:
            module._c.setattr(name, tensor)


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


def _walk(model: nn.Module) -> tuple[dict[nn.Module, str], dict[nn.Parameter, list[str]]]:
    """The modules and parameters of a model, with their names."""
    modules: dict[nn.Module, str] = {}
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(module, prefix)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
    return modules, names


def _fits(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return parameter.is_meta and parameter.grad is None and parameter.dtype == dtype
