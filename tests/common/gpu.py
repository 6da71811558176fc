"""Chooses the device of tests that run on either, and marks those that need CUDA, or a real GPU."""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.cuda_emulator import DEVICE_NAME

DEVICE = "cpu"
"""``cuda`` in a run with ``--cuda``."""

_T = TypeVar("_T")


def there(value: _T, device: torch.device | str | None = None) -> _T:
    """`value` with all its tensors on `device`, or `DEVICE`: plain PyTorch does not move what a model is given."""
    moved: _T = tree_map(lambda item: item.to(device or DEVICE) if isinstance(item, torch.Tensor) else item, value)
    return moved


def pretended() -> bool:
    """Whether the CUDA device is one that is pretended."""
    return torch.cuda.is_available() and torch.cuda.get_device_name() == DEVICE_NAME


def not_pretended(reason: str) -> pytest.MarkDecorator:
    """Marks tests of features that the pretended device lacks."""
    return pytest.mark.skipif(pretended(), reason=reason)


def on_the_cpu(reason: str) -> pytest.MarkDecorator:
    """Marks tests of features that only the CPU has."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=reason)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, or a run with --cuda")
needs_real_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or pretended(), reason="needs a CUDA device with real kernels, times and memory"
)
needs_pretended_gpu = pytest.mark.skipif(
    not pretended(),
    reason="looks into what the pretended device wrote down: a run with --cuda on a machine without a GPU",
)
