"""Picking elements by a known mask."""

from __future__ import annotations

from typing import Any

import torch

from elixir.tracer.values.shadows import Shadows

aten = torch.ops.aten

SELECTIONS = frozenset({aten.index.Tensor, aten.masked_select.default})
"""Operators that pick elements out of their first argument by a mask."""


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
