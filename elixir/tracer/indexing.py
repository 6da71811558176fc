"""Indices whose values a trace must keep: lists of numbers, and masks that say how many elements are picked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from elixir.tracer.shadows import Shadows

aten = torch.ops.aten

SELECTIONS = frozenset({aten.index.Tensor, aten.masked_select.default})
"""Operators that pick elements out of their first argument by a mask."""


@contextlib.contextmanager
def listed_indices_known() -> Iterator[None]:
    """While open, ``x[:, [-1, 0]]`` indexes with a CPU tensor.

    PyTorch would make the list a tensor on meta, below every dispatch mode, and its values would be lost.
    """
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def getitem(self: torch.Tensor, index: Any) -> Any:
        return get(self, _as_tensors(index) if self.is_meta else index)

    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        put(self, _as_tensors(index) if self.is_meta else index, value)

    own = {name: vars(torch.Tensor).get(name) for name in ("__getitem__", "__setitem__")}
    torch.Tensor.__getitem__ = getitem  # type: ignore[assignment]
    torch.Tensor.__setitem__ = setitem  # type: ignore[assignment]
    try:
        yield
    finally:
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
