"""Memory that CUDA's attention kernels allocate for the time of their backward, apart from the gradients.

They need an accumulator in float32 as large as the queries, twice what a gradient in half precision takes. One rule
serves flash and the memory-efficient kernel: sequences and heads are rounded up to each kernel's tiles. Sources:
`flash_attn/flash_api.cpp` (`mha_bwd`), `attention_backward.cu` and `mem_eff_attention/kernel_backward.h` of PyTorch,
`scaled_dot_product_flash_attention.h` of cuDNN's frontend, which asks for the buffers of cuDNN's. What the engines
inside cuDNN ask for themselves is not known, and not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_CUDNN = aten._scaled_dot_product_cudnn_attention_backward.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
_TILED = {
    aten._scaled_dot_product_flash_attention_backward.default: ((0, 4), 128, 32),
    _EFFICIENT: ((0,), 64, 64),
}
"""Kernel -> the arguments, gradient and result, that it copies if heads are not next to each other in a row, and of
what rows and width of its accumulator are multiples."""
_REGISTERS = 128
"""Width of heads up to which the memory-efficient kernel keeps gradients of keys and values in registers."""
_FLOAT_BYTES = 4


def held_in_backward(func: Any, args: Any, round_bytes: Callable[[int], int]) -> int:
    """Bytes, each allocation as the allocator rounds it; 0 for any other operator."""
    if func is _CUDNN:
        gradient, query, output = args[0], args[1], args[4]
        sums = -(-query.numel() // query.shape[3] * _FLOAT_BYTES // 16) * 16
        copy = gradient.nbytes if gradient.stride() != output.stride() else 0
        return round_bytes(copy) + round_bytes(sums + query.numel() * _FLOAT_BYTES)
    if func not in _TILED:
        return 0
    (copied, tall, wide), (query, key, value) = _TILED[func], args[1:4]
    batch, heads, rows, width = query.shape
    sums = batch * heads * -(-rows // tall) * tall * _FLOAT_BYTES
    held = [sums, sums * -(-width // wide) * wide]
    held += [args[at].nbytes for at in copied if not args[at].transpose(1, 2).is_contiguous()]
    if key.shape[1] != heads:  # gradients of keys and values that heads share come per head, and are summed afterwards
        held += [batch * heads * each.shape[2] * each.shape[3] * each.itemsize for each in (key, value)]
    if func is _EFFICIENT and max(width, value.shape[3]) > _REGISTERS:
        held += [batch * heads * each.shape[2] * each.shape[3] * _FLOAT_BYTES for each in (key, value)]
    return sum(map(round_bytes, held))
