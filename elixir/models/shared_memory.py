"""Tensors of a model that share memory without being one: ``head.weight.data = embedding.weight.data``, a view of a
weight that is registered as a buffer, or kept as an attribute.

Plain PyTorch changes both where it changes one. A plan moves every parameter and buffer by itself, so only attributes
can stay views of a weight.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elixir.access.placeholders import is_absent, storage_of
from elixir.errors import InputError
from elixir.memory_order import is_dense
from elixir.torch_private import DisableTorchFunctionSubclass


@dataclass(frozen=True)
class SharedMemory:
    """An attribute in the memory of a weight that is trained."""

    name: str
    weight: str
    """Name of the weight."""
    offset: int
    """Elements from the beginning of the weight's memory."""
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """Its values, as a view of memory that holds the weight's elements in their order from `offset` on."""
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + offset + self.offset)


class _Extent:
    """A tensor with its bytes of a storage, from the first to the last."""

    def __init__(self, name: str, tensor: torch.Tensor, registered: bool) -> None:
        self.name, self.tensor, self.registered = name, tensor, registered
        self.first = int(tensor.storage_offset()) * tensor.itemsize
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.last = self.first + (steps + 1) * tensor.itemsize
        self.trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        self.dense = is_dense(tensor.shape, tensor.stride())


def find_shared_memory(model: nn.Module) -> list[SharedMemory]:
    """Finds attributes in the memory of trained weights.

    Args:
        model: real or on meta, before it is wrapped.

    Raises:
        InputError: a parameter or a buffer shares a trained weight's memory, or an attribute lies in part elsewhere;
            says both names, and what to do.
    """
    found: list[SharedMemory] = []
    with DisableTorchFunctionSubclass():
        for weight, other in _meeting(model):
            inside = weight.first <= other.first and other.last <= weight.last
            alike = inside and weight.dense and other.tensor.dtype == weight.tensor.dtype
            if other.registered or not alike:
                raise _refused(weight, other)
            offset = (other.first - weight.first) // weight.tensor.itemsize
            found.append(SharedMemory(other.name, weight.name, offset, other.tensor.size(), other.tensor.stride()))
    return found


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that modules keep without registering them, as attributes or in a list, a tuple or a dict."""
    modules = list(model.named_modules())
    registered = {
        id(each) for _, module in modules for own in (module._parameters, module._buffers) for each in own.values()
    }
    for prefix, module in modules:
        start = f"{prefix}." if prefix else ""
        for key, value in vars(module).items():
            pairs: Iterable[tuple[Any, Any]]
            if isinstance(value, torch.Tensor):
                pairs = [(None, value)]
            elif not isinstance(value, (dict, list, tuple)) or not value or key in ("_parameters", "_buffers"):
                continue  # another module may have those of the last two by now
            else:
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for place, tensor in pairs:
                if isinstance(tensor, torch.Tensor) and id(tensor) not in registered and not tensor.is_meta:
                    yield f"{start}{key}" + ("" if place is None else f"[{place!r}]"), tensor


def _meeting(model: nn.Module) -> Iterator[tuple[_Extent, _Extent]]:
    """Pairs that share elements: a trained weight, and the other."""
    by_storage: dict[int, list[tuple[str, torch.Tensor, bool]]] = defaultdict(list)
    registered = [(*each, True) for each in (*model.named_parameters(), *model.named_buffers())]
    for name, tensor, known in (*registered, *((*each, False) for each in plain_tensors(model))):
        if tensor.layout == torch.strided and tensor.numel() and (at := storage_of(tensor)):
            by_storage[at].append((name, tensor, known))
    for found in by_storage.values():
        if len(found) == 1:  # nearly all
            continue
        tensors = [each for each in found if not is_absent(each[1])]
        extents = sorted(itertools.starmap(_Extent, tensors), key=lambda each: (each.first, -each.last))
        for place, one in enumerate(extents):
            for two in itertools.islice(extents, place + 1, None):
                if two.first >= one.last:
                    break
                is_same = one.tensor is two.tensor  # an attribute in several places
                if not is_same and (one.trained or two.trained) and _share_elements(one, two):
                    yield (one, two) if one.trained else (two, one)


def _share_elements(one: _Extent, two: _Extent) -> bool:
    """Whether tensors whose extents meet have an element in common."""
    size = one.tensor.itemsize
    if size != two.tensor.itemsize or (one.dense and two.dense):
        return True
    # Columns of one matrix lie between each other without sharing an element.
    start = min(one.first, two.first) // size
    taken = torch.zeros(max(one.last, two.last) // size - start, dtype=torch.bool, device="cpu")
    tensors = one.tensor, two.tensor
    views = [taken.as_strided(each.shape, each.stride(), each.storage_offset() - start) for each in tensors]
    views[0].fill_(True)
    return bool(views[1].any())


def _refused(weight: _Extent, other: _Extent) -> InputError:
    separate = f"give one of them separate memory with {other.name}.data = {other.name}.data.clone()"
    if not other.trained and other.registered:
        return InputError(
            f"{other.name} lies in the memory of {weight.name}, which is trained, and would not follow it to where a "
            f"plan puts it; tie the two as one parameter, or {separate}"
        )
    if not other.trained:
        return InputError(
            f"{other.name} lies in part in the memory of {weight.name}, which is trained, so a step would change it in "
            f"part; compute it from {weight.name} in forward, or {separate}"
        )
    same = (weight.first, weight.tensor.shape) == (other.first, other.tensor.shape)
    way = f"make them one with {other.name} = {weight.name}" if same else "compute one from the other in forward"
    return InputError(
        f"{weight.name} and {other.name} are two parameters in the same memory: each has gradients and optimizer "
        f"states, and both would step it; {way}, or {separate}"
    )
