"""The rules of a CUDA device: allocator, libraries, and what its kernels hold while they run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from elixir.hardware.profile import HardwareProfile
from elixir.tracer.device.target import HALF, Attention, AttentionKernel, Target
from elixir.tracer.operation_kinds import AttentionOfDocuments, attention_of_documents
from elixir.units import KIB, MIB

aten = torch.ops.aten

CUDA_ALLOCATION_BYTES = 512
"""`kMinBlockSize` of PyTorch's CUDA caching allocator: every allocation is a multiple of it."""

CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * KIB
"""PyTorch's default cuBLAS workspace before Hopper, ``:4096:2:16:8`` (CUDABlas / CublasHandlePool)."""
CUBLAS_HOPPER_WORKSPACE_BYTES = 32 * MIB
"""The same from compute capability 9.0 on, ``:4096:8``."""
CUBLASLT_WORKSPACE_BYTES = MIB
"""PyTorch's default for cuBLASLt, which multiplies where a bias is added; seen on an H200 with torch 2.11."""

_MAX_FLASH_HEAD_DIM = 256
_MAX_CUDNN_HEAD_DIM = 128
_CUDNN_WIDE_HEADS = (192, 128)
"""Widths of queries and of values. cuDNN takes this pair although the first is above the limit."""
_CUDNN_DROPOUT_STEPS = 16
"""cuDNN drops by multiples of 1/16; from 2.12 on PyTorch sends it no other probability (pull request 174245)."""

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


class CudaTarget(Target):
    """A CUDA device of a given compute capability, with PyTorch's default settings."""

    kind = "cuda"
    capability: tuple[int, int]
    matrix_libraries = 2
    optimizer_kernel = "foreach"
    product_row_bytes = 16
    """The bytes that tensor cores load at a time: cuBLAS takes an older and much slower kernel for other rows, such as
    those of logits over 50,257 classes."""

    def __init__(self, hardware: HardwareProfile) -> None:
        super().__init__(hardware)
        self.capability = hardware.compute_capability or (8, 0)

    def round_bytes(self, nbytes: int) -> int:
        """Multiples of 512 bytes."""
        return -(-nbytes // CUDA_ALLOCATION_BYTES) * CUDA_ALLOCATION_BYTES

    def attention_kernel(self, call: Attention) -> AttentionKernel:
        """Chooses by the rules of CUDA."""
        return chosen_on_cuda(call, self.capability)

    def matmul_workspace_bytes(self, func: Any, args: Any) -> tuple[int, ...]:
        """The workspace of cuBLAS, and that of cuBLASLt, which adds a bias in the same kernel."""
        cublas = CUBLAS_HOPPER_WORKSPACE_BYTES if self.capability >= (9, 0) else CUBLAS_WORKSPACE_BYTES
        biased = func is aten.addmm.default and args[0].dim() == 1
        return (cublas, CUBLASLT_WORKSPACE_BYTES) if biased else (cublas,)

    def transient_bytes(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:
        """Sorting of ids in the gradient of an embedding (`EmbeddingBackwardKernel.cu`), parts of sums, accumulators of
        attention."""
        held = held_in_backward(func, args, self.round_bytes)
        if held:
            return held
        if func is aten.embedding_dense_backward.default:
            indices = int(args[1].numel())
            if indices > 3072:  # below, one kernel without temporaries
                return 4 * indices * 8  # original and sorted ids, and as much again inside the sort
        if func in (aten.sum.dim_IntList, aten.mean.dim):
            return held_by_sum(args[0], args[1] or (), self.capability)
        return super().transient_bytes(func, args, kwargs, outputs)

    def results(self, func: Any, args: Any, result: Any) -> Any:
        """The memory-efficient kernel leaves the seeds of its dropout on the host, unless a graph is being captured."""
        if func is aten._scaled_dot_product_efficient_attention.default:
            output, log_sum, *seeds = result
            return (output, log_sum, *(torch.empty(0, dtype=seed.dtype, device=seed.device) for seed in seeds))
        return super().results(func, args, result)


def chosen_on_cuda(call: Attention, capability: tuple[int, int]) -> AttentionKernel:
    """cuDNN first on data-centre Hopper and Blackwell, then flash, memory-efficient, math.

    Source: `sdp_utils.cpp` (CUDA) of PyTorch 2.11 to 2.14, with the cuDNN (> 9.15) its wheels bring.
    """
    if len(call.query_shape) != 4 or call.dtype is torch.float64 or not call.last_dim_contiguous:
        return "math"
    if call.broadcasts or not call.mask_last_dim_contiguous:
        return "math"
    half = call.dtype in HALF
    if half and _prefers_cudnn(capability) and _cudnn_takes(call):
        return "cudnn"
    if call.key_shape[1] != call.value_shape[1]:
        return "math"
    head_dims = {call.query_shape[-1], call.key_shape[-1], call.value_shape[-1]}
    head_dim = call.query_shape[-1]
    square = call.query_shape[-2] == call.key_shape[-2]
    flash = half and capability >= (8, 0) and not call.has_mask and len(head_dims) == 1
    if (
        flash
        and head_dim <= _MAX_FLASH_HEAD_DIM
        and (square or not call.is_causal)
        and not _no_wide_heads(call, capability)
    ):
        return "flash"
    alignment = 8 if half else 4
    aligned = all(dim % alignment == 0 for dim in (call.query_shape[-1], call.value_shape[-1]))
    known_dtype = half or call.dtype is torch.float32
    if call.dtype is torch.bfloat16 and capability < (8, 0):
        known_dtype = False
    # From 2.14 on it takes keys and values that heads share (pull request 191085).
    takes_heads = _torch_release() >= (2, 14) or call.key_shape[1] == call.query_shape[1]
    return "efficient" if aligned and known_dtype and takes_heads else "math"


def _prefers_cudnn(capability: tuple[int, int]) -> bool:
    datacenter = capability in ((9, 0), (10, 0), (10, 3))
    return datacenter and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") != "1"


def _no_wide_heads(call: Attention, capability: tuple[int, int]) -> bool:
    """Consumer Ampere to Blackwell lack the shared memory for flash's backward with wide heads."""
    if capability not in ((8, 6), (8, 9), (12, 0), (12, 1)):
        return False
    head_dim = call.query_shape[-1]
    return head_dim > 192 and (head_dim <= 224 or call.dropout > 0)


def _cudnn_takes(call: Attention) -> bool:
    """Whether cuDNN takes a call in half precision (`can_use_cudnn_attention`)."""
    *_, queries, width = call.query_shape
    keys, value_width = call.key_shape[-2], call.value_shape[-1]
    narrow = width <= _MAX_CUDNN_HEAD_DIM and value_width <= _MAX_CUDNN_HEAD_DIM
    if width % 8 or value_width % 8 or not (narrow or (width, value_width) == _CUDNN_WIDE_HEADS):
        return False
    if keys == 1 or (call.dropout and queries == 1):
        return False
    if call.dropout * _CUDNN_DROPOUT_STEPS % 1 and _torch_release() >= (2, 12):
        return False
    mask = call.mask_shape
    if mask is None:
        return True
    full = (*call.query_shape[:2], queries, keys)[-len(mask) :]
    fits = len(mask) in (2, 4) and all(size in (1, whole) for size, whole in zip(mask, full, strict=True))
    return fits and not call.mask_needs_grad


def _torch_release() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def held_in_backward(func: Any, args: Any, round_bytes: Callable[[int], int]) -> int:
    """Bytes that attention allocates for the time of its backward, apart from the gradients; 0 for any other operator.

    Its kernels need an accumulator in float32 as large as the queries, twice what a gradient in half precision takes.
    One rule serves flash and the memory-efficient kernel: sequences and heads are rounded up to each kernel's tiles.
    Sources: `flash_attn/flash_api.cpp` (`mha_bwd`), `attention_backward.cu` and `mem_eff_attention/kernel_backward.h`
    of PyTorch, `scaled_dot_product_flash_attention.h` of cuDNN's frontend, which asks for the buffers of cuDNN's. What
    the engines inside cuDNN ask for themselves is not known, and not in it.

    Args:
        func: the operator.
        args: its arguments.
        round_bytes: rounds an allocation as the allocator does.
    """
    if func is _CUDNN:
        gradient, query, output = args[0], args[1], args[4]
        sums = -(-query.numel() // query.shape[3] * _FLOAT_BYTES // 16) * 16
        copy = gradient.nbytes if gradient.stride() != output.stride() else 0
        return round_bytes(copy) + round_bytes(sums + query.numel() * _FLOAT_BYTES)
    call = attention_of_documents(func, args, {})
    if call is not None and call.kind == "attention_backward":
        return _held_by_documents(call, round_bytes)
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


def _held_by_documents(call: AttentionOfDocuments, round_bytes: Callable[[int], int]) -> int:
    """The same of flash attention over documents, whose sums have room for a tile after each (`mha_varlen_bwd`)."""
    tall, wide = 128, 32
    heads, width = call.query.shape[-2:]
    rows = call.documents * -(-call.longest // tall) * tall
    if call.begins is not None:
        rows = len(call.query) + tall * call.documents
    sums = heads * rows * _FLOAT_BYTES
    held = [sums, sums * -(-width // wide) * wide]
    if call.key.shape[-2] != heads:  # as in `held_in_backward`
        held += [each.nbytes // each.shape[-2] * heads for each in (call.key, call.value)]
    return sum(map(round_bytes, held))


def held_by_sum(summed: torch.Tensor, dims: Iterable[int], capability: tuple[int, int]) -> int:
    """Bytes that a sum of a tensor over `dims` (over all, if empty) takes on a device of this compute capability.

    A sum over rows, such as the gradient of a bias, is split among blocks of threads where one block would have many
    rows to add. Each block leaves its sums in a buffer in device memory: up to 135 MiB on a card of 132 multiprocessors
    (`setReduceConfig` of `cuda/Reduce.cuh`).

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
