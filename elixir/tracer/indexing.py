"""Values that PyTorch would drop on meta: lists of numbers in an index, or made a tensor; and picking by a known mask."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from elixir.tracer.shadows import Shadows

aten = torch.ops.aten

SELECTIONS = frozenset({aten.index.Tensor, aten.masked_select.default})
"""Operators that pick elements out of their first argument by a mask."""


@contextlib.contextmanager
def python_values_known() -> Iterator[None]:
    """While open, ``x[:, [-1, 0]]`` and ``torch.tensor([1, 2], device=x.device)`` go by way of a CPU tensor.

    PyTorch would make the list a tensor on meta, below every dispatch mode, and its values would be lost.
    """
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__
    makers = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}

    def by_way_of_host(make: Any) -> Any:
        @functools.wraps(make)
        def made(data: Any, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is None or torch.device(device).type != "meta" or isinstance(data, torch.Tensor):
                return make(data, *args, **kwargs)
            wants_gradient = kwargs.pop("requires_grad", False)
            return make(data, *args, **{**kwargs, "device": "cpu"}).to("meta").requires_grad_(wants_gradient)

        return made

    def getitem(self: torch.Tensor, index: Any) -> Any:
        return get(self, _as_tensors(index) if self.is_meta else index)

    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        put(self, _as_tensors(index) if self.is_meta else index, value)

    own = {name: vars(torch.Tensor).get(name) for name in ("__getitem__", "__setitem__")}
    torch.Tensor.__getitem__ = getitem  # type: ignore[assignment]
    torch.Tensor.__setitem__ = setitem  # type: ignore[assignment]
    for name, make in makers.items():
        setattr(torch, name, by_way_of_host(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)
        for name, function in own.items():
            if function is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, function)


def picked(shadows: Shadows, func: Any, args: Any) -> tuple[Any, int]:
    """A selection by masks, rewritten as one by positions, and the bytes the positions take while it runs.

    Args:
        func: one of `SELECTIONS`, whose first argument is not known; the masks are, or this raises `TraceError`.

    Returns:
        Arguments for ``aten.index.Tensor``.
    """
    tensor = args[0]
    masks = [args[1]] if func is aten.masked_select.default else args[1]
    if func is aten.masked_select.default and tensor.shape != masks[0].shape:
        shape = torch.broadcast_shapes(tensor.shape, masks[0].shape)
        tensor, masks = tensor.expand(shape), [masks[0].expand(shape)]
    positions: list[torch.Tensor | None] = []
    taken = 0
    for mask in masks:
        if mask is None or mask.dtype not in (torch.bool, torch.uint8):
            positions.append(mask)
            continue
        count = len(shadows.evaluate(aten.nonzero.default, (mask,), {}))
        positions.extend(torch.empty(count, dtype=torch.int64, device="meta") for _ in range(mask.dim()))
        taken += count * mask.dim() * torch.int64.itemsize
    return (tensor, positions), taken


def _as_tensors(index: Any) -> Any:
    if type(index) is tuple:
        return tuple(_as_tensor(item) for item in index)
    return _as_tensor(index)


def _as_tensor(item: Any) -> Any:
    if isinstance(item, np.ndarray) and item.dtype.kind in "biu":
        return torch.tensor(item, device="cpu")
    if isinstance(item, list) and item and all(type(entry) in (int, bool) for entry in item):
        return torch.tensor(item, device="cpu")
    return item
