"""Chooses the device of tests that run on either, and marks those that need CUDA, or a real GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from elixir.tracer.device.cuda_target import CUBLAS_HOPPER_WORKSPACE_BYTES, CUBLASLT_WORKSPACE_BYTES
from elixir.units import MIB
from tests import cuda_emulator

DEVICE = "cpu"
"""``cuda`` in a run with ``--cuda``."""

_T = TypeVar("_T")


def there(value: _T, device: torch.device | str | None = None) -> _T:
    """`value` with all its tensors on `device`, or `DEVICE`: plain PyTorch does not move what a model is given. A model
    is moved as it is."""
    where = torch.device(device or DEVICE)
    if isinstance(value, nn.Module):
        _move(value, where)
        return value
    moved: _T = tree_map(lambda item: item.to(where) if isinstance(item, torch.Tensor) else item, value)
    return moved


def _move(model: nn.Module, where: torch.device) -> None:
    """Moves a model. Tensors that share memory share it afterwards, too: `Module.to` would give each a copy."""
    named = [*model.named_parameters(), *model.named_buffers()]
    places = {name: _place(each) for name, each in named if type(each) in (torch.Tensor, nn.Parameter)}
    shared = Counter(pointer for pointer, *_ in places.values() if pointer)
    before = {name: each.untyped_storage() for name, each in named if shared[places.get(name, (0,))[0]] > 1}
    model.to(where)
    storages: dict[int, torch.UntypedStorage] = {}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if name in before and each.device != before[name].device:
            pointer, *form = places[name]
            if pointer not in storages:
                whole = torch.empty(0, dtype=torch.uint8, device=before[name].device)
                whole.set_(before[name], 0, (before[name].nbytes(),), (1,))
                storages[pointer] = whole.to(where).untyped_storage()
            each.data = torch.empty(0, dtype=each.dtype, device=where).set_(storages[pointer], *form)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def with_cublas(size: str, *, biased: bool = True) -> str:
    """A device budget in MiB, and on CUDA what cuBLAS keeps there in two streams, and cuBLASLt for layers with biases."""
    if DEVICE == "cpu":
        return size
    kept_bytes = 2 * (CUBLAS_HOPPER_WORKSPACE_BYTES + biased * CUBLASLT_WORKSPACE_BYTES)
    return f"{float(size.removesuffix('MiB')) + kept_bytes / MIB:g}MiB"


def pretended() -> bool:
    """Whether the CUDA device is one that is pretended."""
    return cuda_emulator.is_installed()  # a real device is not asked: ranks could not be forked from this process


def has_cpu_kernels() -> bool:
    """Whether tests run on the CPU, or on a device that is pretended, whose kernels have the CPU's bits."""
    return DEVICE == "cpu" or pretended()


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
