"""Memory that CUDA's attention kernels allocate for the time of their backward, apart from the gradients.

They need an accumulator in float32 as large as the queries, twice what a gradient in half precision takes. Sources:
`flash_attn/flash_api.cpp` (`mha_bwd`), `attention_backward.cu` and `mem_eff_attention/kernel_backward.h` of PyTorch,
`scaled_dot_product_flash_attention.h` of cuDNN's frontend, which asks for the buffers of cuDNN's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_FLOAT_BYTES = 4
_FLASH_ROWS = 128
"""Flash rounds sequences up to this."""
_LOCK_FLOATS = 4
"""Floats of the lock in front of each tile of the memory-efficient kernel's accumulator."""
_MAX_SPLIT_BLOCKS = 200
"""Blocks over which the memory-efficient kernel splits keys, if their gradients are accumulated in memory as well."""


def held_in_backward(func: Any, args: Any, round_bytes: Callable[[int], int]) -> int:
    """Bytes, each allocation as the allocator rounds it; 0 for any other operator.

    What the engines inside cuDNN ask for themselves is not known, and not in it.
    """
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        return sum(round_bytes(nbytes) for nbytes in _flash(*args[:5]))
    if func is aten._scaled_dot_product_cudnn_attention_backward.default:
        return sum(round_bytes(nbytes) for nbytes in _cudnn(args[0], args[1], args[4]))
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        return max(sum(round_bytes(nbytes) for nbytes in phase) for phase in _efficient(*args[:4]))
    return 0


def _flash(
    grad_output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> list[int]:
    batch, heads, rows, width = query.shape
    rows = _rounded(rows, _FLASH_ROWS)
    wide = _rounded(width, 32) if width <= 192 else 256
    held = [_copy_by_rows(grad_output), _copy_by_rows(output)]
    held += [batch * heads * rows * _FLOAT_BYTES, batch * heads * rows * wide * _FLOAT_BYTES]
    return held + _per_head(query, key, value)


def _cudnn(grad_output: torch.Tensor, query: torch.Tensor, output: torch.Tensor) -> list[int]:
    batch, heads, rows, width = query.shape
    row_sums = _rounded(batch * heads * rows * _FLOAT_BYTES, 16)
    copy = grad_output.nbytes if grad_output.stride() != output.stride() else 0
    return [copy, row_sums + batch * heads * rows * width * _FLOAT_BYTES]


def _efficient(
    grad_output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Sizes of the row sums, which only the half-precision kernels work out themselves, and of the kernel."""
    batch, heads, rows, width = query.shape
    half = query.dtype is not torch.float32
    widest = max(width, value.shape[3])
    block_rows = 64 if widest <= 64 else 128
    block_columns = 128 if half and 64 < widest <= 128 else 64
    tiles = -(-rows // block_rows) * -(-width // block_columns)
    floats = tiles * (block_rows * block_columns + _LOCK_FLOATS)
    if half and widest > block_rows:  # the gradients of keys and values do not fit the registers either
        splits = max(1, min(-(-key.shape[2] // block_columns), _MAX_SPLIT_BLOCKS // (batch * heads)))
        floats += splits * block_columns * (_rounded(width, block_rows) + _rounded(value.shape[3], block_rows))
    row_sums = batch * heads * rows * _FLOAT_BYTES
    copy = _copy_by_rows(grad_output)
    products = [] if half else [grad_output.numel() * _FLOAT_BYTES, row_sums]
    shared = _per_head(query, key, value)
    workspace = batch * heads * _rounded(floats, 4) * _FLOAT_BYTES
    return [copy, row_sums, *shared, *products], [copy, row_sums, *shared, workspace]


def _per_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[int]:
    """Gradients of keys and values that heads share: they come per head, and are summed afterwards."""
    batch, heads = query.shape[:2]
    if key.shape[1] == heads:
        return []
    return [batch * heads * tensor.shape[2] * tensor.shape[3] * tensor.itemsize for tensor in (key, value)]


def _copy_by_rows(tensor: torch.Tensor) -> int:
    """Bytes of the copy that the kernel makes where heads are not next to each other in a row."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.nbytes


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
