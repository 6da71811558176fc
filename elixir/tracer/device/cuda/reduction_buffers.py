"""Device memory that sums of PyTorch's CUDA build hold while they run (`setReduceConfig` of `cuda/Reduce.cuh`).

A sum over rows, such as the gradient of a bias, is split among blocks of threads where one block would have many rows
to add. Each block leaves its sums in a buffer in device memory: up to 135 MiB on a card of 132 multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

PROCESSORS = {7: 80, 8: 108, 9: 132, 10: 148, 12: 170}
"""Major compute capability -> multiprocessors of V100, A100, H100, B200 and RTX 5090 (NVIDIA's datasheets). A sum over
few columns is split among them."""
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Threads of a multiprocessor, where they are not 2048 (CUDA C++ Programming Guide, table of compute capabilities)."""
_BLOCK_THREADS = 512
_WARP = 32
_FEW_VALUES, _MANY_VALUES = 16, 256
"""Numbers that a thread adds: a sum is split further above the second, into parts of no fewer than the first."""
_INDEXED_BYTES = 2**31
"""A tensor of so many bytes is halved before it is summed, until it has fewer."""


def held_by_sum(summed: torch.Tensor, dims: Iterable[int], capability: tuple[int, int]) -> int:
    """Bytes that a sum of a tensor over `dims` (over all, if empty) takes on a device of this compute capability.

    Counted where the fastest dimension is kept; otherwise blocks share one number per result, which is little.
    """
    if not summed.dim():
        return 0
    every = set(range(summed.dim()))
    over = {dim % summed.dim() for dim in dims} or every
    kept, lost = _merged(summed, every - over), _merged(summed, over)
    results, added = (math.prod(size for _, size in dimensions) for dimensions in (kept, lost))
    if not summed.numel() or not kept or not lost or lost[0][0] < kept[0][0]:
        return 0
    while added * results * summed.itemsize >= _INDEXED_BYTES and added > 1:
        added = -(-added // 2)
    vector = 1
    if kept[0][0] == 1:
        multiples = (summed.storage_offset(), kept[0][1], *(stride for stride, _ in (*kept[1:], *lost)))
        vector = next(count for count in (4, 2, 1) if not any(number % count for number in multiples))
    width, height = _block(results // vector, added, _BLOCK_THREADS // vector)
    values, grid = -(-added // height), -(-(results // vector) // width)
    wanted = PROCESSORS.get(capability[0], PROCESSORS[8]) * (THREADS.get(capability, 2048) // (width * height))
    if values < _MANY_VALUES or grid > wanted:
        return 0
    parts = max(min(-(-wanted // grid), -(-values // _FEW_VALUES)), -(-values // _MANY_VALUES))
    # Sums of each part, in float32 or wider, for every column of a block; a counter for each block.
    return max(summed.itemsize, 4) * results * parts * width * vector + 4 * grid if parts > 1 else 0


def _merged(tensor: torch.Tensor, dims: set[int]) -> list[tuple[int, int]]:
    """Stride and size of some of a tensor's dimensions, the fastest first, those that follow each other as one."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted((tensor.stride(dim), tensor.shape[dim]) for dim in dims if tensor.shape[dim] > 1):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0], merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged


def _block(columns: int, rows: int, threads: int) -> tuple[int, int]:
    """Width and height of a block: powers of two, as wide as a warp, or wider for few rows."""
    most = (min(1 << max(count, 1).bit_length() - 1, threads) for count in (columns, rows))
    wide, high = most
    height = min(high, threads // min(wide, _WARP))
    return min(wide, threads // height), height
