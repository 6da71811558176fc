"""Helpers that kernels written in Python need to run as others do on the pretended device: on its memory, without
waiting."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_device: ModuleType


def implement(device: ModuleType, kernels: dict[str, Callable[..., Any]]) -> torch.library.Library:
    """Gives operators of aten, by name, kernels for CUDA tensors, for as long as the library lives."""
    global _device
    _device = device
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, _written_down(name, kernel), "CUDA")
    return library


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a CPU tensor, valid until the kernel returns."""
    return _device.on_cpu(tensor)


def write(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The tensor, on the device, with these values."""
    host(tensor).copy_(values)
    return tensor


def on_device(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new contiguous tensor with these values."""
    return write(torch.empty(values.shape, dtype=dtype or values.dtype, device="cuda"), values)


def _written_down(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        _device.ran(f"aten::{name}", *(_tensors(items) for items in ((args, kwargs), result)))
        return result

    return run


def _tensors(items: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(items) if isinstance(item, torch.Tensor) and item.is_cuda]
