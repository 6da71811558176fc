"""Moves a forward's arguments to the device and casts them to the plan's dtype."""

from __future__ import annotations

from typing import Any

import torch

from elixir.torch_private import tree_flatten, tree_unflatten


def cast_inputs(arguments: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Moves tensors to `device` and casts floating ones to `dtype`. Returns the caller's own containers if nothing
    changes."""
    given, form = tree_flatten(arguments)
    moved = [_moved(item, device, dtype) for item in given]
    if all(new is old for new, old in zip(moved, given, strict=True)):
        return arguments  # the model may write into the caller's lists and dicts
    return tree_unflatten(moved, form)


def _moved(item: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return item.to(device, dtype) if dtype is not None and item.is_floating_point() else item.to(device)
