"""The rules of a CUDA device: allocator, libraries, and what its kernels hold while they run."""

from __future__ import annotations

from typing import Any

import torch

from elixir.hardware.profile import HardwareProfile
from elixir.tracer.device.common.attention import Attention, AttentionKernel
from elixir.tracer.device.common.target import Target
from elixir.tracer.device.cuda.attention_buffers import held_in_backward
from elixir.tracer.device.cuda.attention_choice import chosen_on_cuda
from elixir.tracer.device.cuda.reduction_buffers import held_by_sum
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


class CudaTarget(Target):
    """A CUDA device of a given compute capability, with PyTorch's default settings."""

    kind = "cuda"
    native_dropout = True
    fused_rms_norm = True
    softmax_reads_half = True
    matrix_libraries = 2
    optimizer_kernel = "foreach"
    product_row_bytes = 16
    """The bytes that tensor cores load at a time: cuBLAS takes an older and much slower kernel for other rows, such as
    those of logits over 50,257 classes."""

    def __init__(self, hardware: HardwareProfile) -> None:
        super().__init__(hardware)
        self.capability = self.cuda_capability = hardware.compute_capability or (8, 0)

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
