"""The tensors of a model: where its buffers are registered, which of them take another dtype together with the model,
which a forward changes, and a fingerprint of their names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elixir.artifact import digest
from elixir.errors import InputError
from elixir.models.quantised import InnerTensors, companions, is_packed


class BufferPlace(NamedTuple):
    """A place where a buffer is registered, or where a tensor hangs that unpacks a quantised weight."""

    name: str
    """The buffer's name in the model; that of a companion is ``<weight>.<companion>``."""
    holder: Any
    """The module, or the object with the quantisation's tensors."""
    key: str
    """The buffer's name in its holder."""
    buffer: torch.Tensor
    is_persistent: bool
    """Whether the buffer is part of a state dict."""

    @property
    def present(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        tensor = getattr(self.holder, self.key, None)  # since a TorchScript module's buffers lack get()
        return tensor if isinstance(tensor, torch.Tensor) else None

    def put(self, buffer: torch.Tensor) -> None:
        """Registers another buffer instead."""
        if isinstance(self.holder, nn.Module):
            self.holder._buffers[self.key] = buffer
        else:
            setattr(self.holder, self.key, buffer)

    def cast(self, dtype: torch.dtype | None) -> torch.dtype:
        """Returns the dtype of the buffer where floating ones take `dtype`; companions keep their own."""
        return cast_dtype(self.buffer, dtype) if isinstance(self.holder, nn.Module) else self.buffer.dtype


def buffer_places(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[BufferPlace]:
    """All places of buffers, since `torch.nn.Module.named_buffers` names no module.

    With `remove_duplicate`, modules with several names are visited once.
    """
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        start = f"{prefix}." if prefix else ""
        # torch has no public query for this, and `state_dict()` would run hooks that may gather full weights.
        passing = module._non_persistent_buffers_set
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield BufferPlace(start + key, module, key, buffer, key not in passing)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                for name, holder, own in companions(parameter):
                    yield BufferPlace(f"{start}{key}.{name}", holder, own, getattr(holder, own), True)


def cast_dtype(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a parameter or buffer of a model that is cast to `dtype`.

    Whole numbers and packed ones stay what they are: a cast would change packed bytes, not their meaning.
    """
    casts = dtype is not None and parameter.is_floating_point() and not is_packed(parameter)
    return dtype if casts and dtype is not None else parameter.dtype


def casts_buffers(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether floating buffers take `dtype` together with the parameters, as `model.to(dtype)` has it.

    They do where the model is cast as a whole. Where some parameters are of `dtype` already, its author built it so,
    and buffers in another one (such as the float32 frequencies of rotary positions) are meant to be.
    """
    if dtype is None:
        return False
    dtypes = {
        parameter.dtype
        for parameter in model.parameters()
        if parameter.is_floating_point() and not is_packed(parameter)
    }
    return bool(dtypes) and dtype not in dtypes


class ModuleState:
    """The tensors that modules hold next to their parameters, as they are when this is made.

    Args:
        model: all its modules are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: (value, _version(value)) for name, value in _held(model)}

    def changed(self) -> str | None:
        """The name of the first that forward has written to, or put another in its place of; None if there is none."""
        for name, value in _held(self._model):
            before = self._before.get(name)
            if before is None or before[0] is not value or before[1] != _version(value):
                return name
        return None


def _version(tensor: torch.Tensor) -> int | None:
    """Counts what has written to a tensor; None for one made under `torch.inference_mode`, which nothing counts."""
    return None if tensor.is_inference() else tensor._version


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        kinds = {*map(type, vars(module).values()), *map(type, module._buffers.values())}
        if not any(issubclass(kind, torch.Tensor) for kind in kinds):  # nearly always
            continue
        if any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__):
            continue  # a metric collects micro-batch by micro-batch, and nothing of the model reads it
        for held in (vars(module), module._buffers):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield (f"{path}.{name}" if path else name), value


def fingerprint(model: nn.Module, *, forward: bool = False) -> str:
    """16 hex digits over the model's layout; the same on meta and real, and in every process.

    Covers, in order, each parameter's first name, shape, whether it is trained and its other (tied) names, each
    persistent buffer's name and shape, and the class of each parameter that was taken apart (`InnerTensors`). Left out
    on purpose: values; dtypes, since a plan made for bf16 fits the fp32 model that the wrapper casts; buffers that are
    not saved, since they are no part of the model's state.

    Args:
        model: on meta or real.
        forward: it is only evaluated, so that no parameter counts as trained.

    Raises:
        InputError: the model has lazy parameters or buffers, whose shapes only a first forward decides.
    """
    # Identity is only a key here, never an order: dicts keep the order of `named_parameters`.
    names: dict[int, list[str]] = {}
    layout: dict[int, tuple[list[int], bool]] = {}
    persistent = [place for place in buffer_places(model, remove_duplicate=False) if place.is_persistent]
    own = list(model.named_parameters(remove_duplicate=False))
    for name, tensor in (*own, *((place.name, place.buffer) for place in persistent)):
        if is_lazy(tensor):
            raise InputError(f"{name!r} is lazy and has no shape yet; run one forward through the model first")
    for name, param in own:
        names.setdefault(id(param), []).append(name)
        layout[id(param)] = (list(param.shape), param.requires_grad and not forward)
    parameters = [(first, *layout[key], aliases) for key, (first, *aliases) in names.items()]
    buffers = [(place.name, list(place.buffer.shape)) for place in persistent]
    modules = model.named_modules(remove_duplicate=False)
    kinds = [(name, each.kind.__name__) for name, each in modules if isinstance(each, InnerTensors)]
    return digest(parameters, buffers, *([kinds] if kinds else []))
