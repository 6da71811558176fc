"""Rules that make meta tensors behave as the target device would.

Meta runs the device-independent part of PyTorch. What differs per device, and matters for memory, is here: whether
dropout keeps a mask or a noise tensor, how sizes are rounded, what libraries keep for themselves, how the optimizer
runs, and what kernels hold only while they run. The choice of an attention kernel is in `attention_choice`. Each rule
names where it comes from; `docs/appendix/tracer_rules.md` says which ones a measurement has confirmed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import torch

from elixir.hardware.profile import HardwareProfile
from elixir.torch_private import suggest_memory_format
from elixir.tracer.device.attention_buffers import held_in_backward
from elixir.tracer.device.attention_choice import HALF, Attention, AttentionKernel, chosen_on_cpu, chosen_on_cuda
from elixir.tracer.device.kernel_memory import KERNELS_HERE, is_plain
from elixir.units import KIB, MIB

aten = torch.ops.aten

OptimizerKernel = Literal["for-loop", "foreach", "fused"]

CUDA_ALLOCATION_BYTES = 512
"""`kMinBlockSize` of PyTorch's CUDA caching allocator: every allocation is a multiple of it."""

CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * KIB
"""PyTorch's default cuBLAS workspace before Hopper, ``:4096:2:16:8`` (CUDABlas / CublasHandlePool)."""
CUBLAS_HOPPER_WORKSPACE_BYTES = 32 * MIB
"""The same from compute capability 9.0 on, ``:4096:8``."""

_MATRIX_OPERANDS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
"""Which arguments of a product go to a BLAS as they are, if their layout allows."""

_LOSSES_KEEPING_TERMS = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.soft_margin_loss.default: 2,
}
"""Losses that write their terms into the result before reducing it, and the position of `reduction`."""

_CONTIGUOUS_FIRST = frozenset(
    {aten.native_layer_norm_backward.default, aten._log_softmax_backward_data.default, aten.mse_loss_backward.default}
)
"""Kernels that write a contiguous first result on every device, where the meta kernels keep the argument's strides."""


class Target:
    """The device a trace pretends to run on; this base is what holds for every device.

    Args:
        hardware: profile of the machine, of which kind and compute capability are used.
    """

    kind: Literal["cuda", "cpu"]
    native_dropout = False
    """Whether dropout keeps a bool mask (True) or a noise tensor in the activation's dtype."""
    fused_rms_norm = False
    """Whether `rms_norm` is one kernel (True) or composed of others."""
    softmax_reads_half = False
    """Whether a softmax told to give float32 reads float16 as it is (True) or has it cast first."""
    counts_host_tensors = False
    """Whether tensors that the step makes on the CPU are in the memory that is being predicted."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self.name = hardware.name
        self.unverified: dict[str, dict[Any, None]] = {}
        """Unconfirmed assumption of a prediction -> the operators of the step for which it was taken."""

    def round_bytes(self, nbytes: int) -> int:
        """Bytes that the allocator takes for a request of `nbytes`."""
        return nbytes

    def attention_kernel(self, call: Attention) -> AttentionKernel:
        """The kernel `scaled_dot_product_attention` chooses."""
        raise NotImplementedError

    def optimizer_kernel(self) -> OptimizerKernel:
        """How `torch.optim` runs by default."""
        raise NotImplementedError

    def matmul_workspace_bytes(self) -> int:
        """Bytes that the matrix library allocates, through PyTorch's allocator, at the first product on a thread."""
        return 0

    def transient_bytes(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:
        """Bytes that a kernel allocates and frees again while it runs, apart from its results.

        This base knows what is composed alike everywhere. Matrix products: an operand that no BLAS can read as it lies
        is copied first, one at a time (`prepare_matrix_for_cublas` in `cuda/Blas.cpp`, `addmm_impl_cpu_` in
        `LinearAlgebra.cpp`). The softmax of the math form of attention: what it masks by.
        """
        if func in _MATRIX_OPERANDS:
            unreadable = [args[at] for at in _MATRIX_OPERANDS[func] if not _blas_reads(args[at])]
            nbytes: int = sum(operand.nbytes for operand in unreadable)
            return nbytes
        if func is aten._safe_softmax.default and outputs[0].numel():
            # Which scores are -inf, which rows have nothing else, and a zero for those (`attention.cpp`).
            scores = outputs[0].numel()
            return scores + scores // int(outputs[0].shape[args[1]]) + outputs[0].itemsize
        return 0

    def results(self, func: Any, args: Any, result: Any) -> Any:
        """The result of the device's kernel if its meta kernel says otherwise.

        Strides matter: a gradient that is not contiguous is copied by the next `reshape`.
        A mean squared error and its kin are scalars in a storage of the size of their terms: the kernels resize their
        output after the terms were in it (`BinaryOps.cpp`, `Loss.cpp`), and a storage does not shrink.
        A convolution puts channels last if its input or weight has them there (`ConvUtils.h`).
        """
        if func is aten.convolution.default:
            return _channels_as_in(args[:2], result)
        if func in _CONTIGUOUS_FIRST:
            first, *others = (result,) if isinstance(result, torch.Tensor) else result
            if first is None or first.is_contiguous():
                return result
            first = torch.empty(first.shape, dtype=first.dtype, device=first.device)
            return (first, *others) if others else first
        position = _LOSSES_KEEPING_TERMS.get(func)
        if position is None or result.dim() or (len(args) > position and args[position] == 0):
            return result
        terms = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return torch.empty(terms, dtype=result.dtype, device=result.device).resize_(())


class CudaTarget(Target):
    """A CUDA device of a given compute capability, with PyTorch's default settings."""

    kind = "cuda"
    native_dropout = True
    fused_rms_norm = True
    softmax_reads_half = True

    def __init__(self, hardware: HardwareProfile) -> None:
        super().__init__(hardware)
        self.capability = hardware.compute_capability or (8, 0)

    def round_bytes(self, nbytes: int) -> int:
        """Multiples of 512 bytes."""
        return -(-nbytes // CUDA_ALLOCATION_BYTES) * CUDA_ALLOCATION_BYTES

    def attention_kernel(self, call: Attention) -> AttentionKernel:
        """By the rules of CUDA."""
        return chosen_on_cuda(call, self.capability)

    def optimizer_kernel(self) -> OptimizerKernel:
        """`torch.optim` takes foreach for CUDA parameters unless told otherwise."""
        return "foreach"

    def matmul_workspace_bytes(self) -> int:
        """The cuBLAS workspace of one handle; the thread of the backward pass has a separate handle."""
        return CUBLAS_HOPPER_WORKSPACE_BYTES if self.capability >= (9, 0) else CUBLAS_WORKSPACE_BYTES

    def transient_bytes(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:
        """Sorting of ids in the gradient of an embedding (`EmbeddingBackwardKernel.cu`), accumulators of attention."""
        held = held_in_backward(func, args, self.round_bytes)
        if held:
            return held
        if func is aten.embedding_dense_backward.default:
            indices = int(args[1].numel())
            if indices > 3072:  # below, one kernel without temporaries
                return 4 * indices * 8  # original and sorted ids, and as much again inside the sort
        return super().transient_bytes(func, args, kwargs, outputs)

    def results(self, func: Any, args: Any, result: Any) -> Any:
        """The memory-efficient kernel leaves the seeds of its dropout on the host, unless a graph is being captured."""
        if func is aten._scaled_dot_product_efficient_attention.default:
            output, log_sum, *seeds = result
            return (output, log_sum, *(torch.empty(0, dtype=seed.dtype, device=seed.device) for seed in seeds))
        return super().results(func, args, result)


_NOT_COUNTED = "what these allocate beyond their results is not counted, as they are too large to be run for a number"
_CONTINUED = "what these allocate beyond their results is told from smaller batches"


class CpuTarget(Target):
    """The CPU: every rule of it can be checked byte for byte against a real run."""

    kind = "cpu"
    counts_host_tensors = True

    def __init__(self, hardware: HardwareProfile) -> None:
        super().__init__(hardware)
        self._threads = torch.get_num_threads()

    def attention_kernel(self, call: Attention) -> AttentionKernel:
        """By the rules of the CPU."""
        return chosen_on_cpu(call)

    def optimizer_kernel(self) -> OptimizerKernel:
        """`torch.optim` loops over the parameters on the CPU."""
        return "for-loop"

    def transient_bytes(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:
        """Buffers of each thread, and copies that kernels make; as many threads as PyTorch has here.

        The rules follow `Copy.cpp`, `Embedding.cpp`, `FlashAttentionKernel.cpp`, `layer_norm_kernel.cpp`,
        `LossCTC.cpp`, `Normalization.cpp` and `SoftMax.cpp`; operators for which there is none are run and observed
        (`elixir.tracer.device.kernel_memory`).
        """
        if torch.Tag.pointwise in func.tags:
            return _promoted_bytes(func, args)
        if not is_plain(func, args):
            found = KERNELS_HERE.of(func, args, kwargs)
            if found is None:
                self.unverified.setdefault(_NOT_COUNTED, {})[func] = None
                return super().transient_bytes(func, args, kwargs, outputs)
            if found.continued:
                self.unverified.setdefault(_CONTINUED, {})[func] = None
            return max(0, found.peak_bytes - sum(output.untyped_storage().nbytes() for output in outputs))
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return _cpu_flash_buffers(args[0], args[1], self._threads, backward=False)
        if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            buffers = _cpu_flash_buffers(args[1], args[2], self._threads, backward=True)
            return _contiguous_copy(args[0].transpose(1, 2)) + buffers
        if func is aten.native_layer_norm_backward.default:
            sums: int = 2 * self._threads * math.prod(args[2]) * args[0].itemsize
            return _contiguous_copy(args[0]) + sums
        if func in _COPIES:
            return _transposed_tile(source=args[_COPIES[func]], copy=outputs[0])
        if func in _CONTIGUOUS_INPUTS:
            return sum(_contiguous_copy(item) for item in args[: _CONTIGUOUS_INPUTS[func]])
        if func is aten._ctc_loss_backward.default:
            return int(args[6].nbytes)  # the betas, as large as the alphas (`LossCTC.cpp`)
        if func is aten.native_batch_norm_backward.default:
            return int(args[1].nbytes)  # a second gradient of the input, of which one is thrown away
        return super().transient_bytes(func, args, kwargs, outputs)

    def results(self, func: Any, args: Any, result: Any) -> Any:
        """Layer norm keeps its statistics in the dtype of input and weight, if they agree (`layer_norm_kernel.cpp`).

        oneDNN's recurrent layers keep a workspace for backward.
        """
        if func is aten.mkldnn_rnn_layer.default:
            found = KERNELS_HERE.of(func, args, {})
            if found is not None:
                *others, workspace = result
                return (*others, workspace.new_empty(found.result_bytes[-1], dtype=torch.uint8))
        if func is aten.native_layer_norm.default and args[0].dtype in HALF:
            weight = args[2]
            if weight is None or weight.dtype == args[0].dtype:
                output, *statistics = result
                return (output, *(torch.empty_like(statistic, dtype=args[0].dtype) for statistic in statistics))
        return super().results(func, args, result)


_CONTIGUOUS_INPUTS = {
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
    aten.embedding_dense_backward.default: 2,
}
"""Kernel -> how many of its first arguments it copies if they are not contiguous (`SoftMax.cpp`, `Embedding.cpp`)."""
_COPIES = {aten.copy_.default: 1, aten.clone.default: 0, aten._to_copy.default: 0}
"""Operator that copies elements in their dtype, or in another -> which argument it reads."""
_TILE_SIDE, _TILE_SIDE_OF_BYTES = 60, 120
"""Rows and columns of the tile through which the CPU transposes a matrix (`Copy.cpp`)."""


def _transposed_tile(source: torch.Tensor, copy: torch.Tensor) -> int:
    """Bytes of the tile, which a matrix of that many elements passes on its way to a contiguous copy (`Copy.cpp`)."""
    transposed = source.dim() == 2 and source.stride() == (1, source.shape[0])
    same = source.dtype == copy.dtype and source.shape == copy.shape and copy.is_contiguous()
    if not (transposed and same) or copy.numel() < _TILE_SIDE**2:
        return 0
    side = _TILE_SIDE_OF_BYTES if copy.dtype is torch.uint8 else _TILE_SIDE
    return side * side * copy.itemsize


def _cpu_flash_buffers(query: torch.Tensor, key: torch.Tensor, threads: int, *, backward: bool) -> int:
    """Bytes of the buffers of the CPU's flash attention, which its threads share out among them."""
    length = query.shape[2]
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    columns = min(key.shape[2], 512)
    accumulated = 8 if query.dtype is torch.float64 else 4
    halves = query.itemsize if query.dtype in HALF else 0
    if backward:
        each = rows * columns * (2 * accumulated + 2 * halves)
        return each * threads + rows * accumulated
    each = (rows * columns + 2 * rows + rows * query.shape[3]) * accumulated + rows * columns * halves
    return each * threads


_TAKES_ANY_MASK = frozenset({aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor})


def _promoted_bytes(func: Any, args: Any) -> int:
    """Copies of operands in the dtype that they have in common (`TensorIterator.cpp`; other devices cast as they
    read)."""
    tensors = [item for item in args if isinstance(item, torch.Tensor) and item.dim()]
    if len({tensor.dtype for tensor in tensors}) < 2 or func in _TAKES_ANY_MASK:
        return 0
    common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common)


def _channels_as_in(operands: Any, result: torch.Tensor) -> torch.Tensor:
    """The result of a convolution, laid out by the formats that PyTorch reads off the strides of its operands.

    One over three dimensions is one over four, of a contiguous input (`Convolution.cpp`).
    """
    if result.dim() == 3:
        images = operands[0].contiguous().unsqueeze(2), operands[1].unsqueeze(2)
        return _channels_as_in(images, result.unsqueeze(2)).squeeze(2)
    formats = {suggest_memory_format(item) for item in operands}
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim())
    return torch.empty_like(result, memory_format=last if last in formats else torch.contiguous_format)


def _contiguous_copy(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.itemsize


def _blas_reads(matrix: torch.Tensor) -> bool:
    """Whether rows or columns lie one after the other without overlap."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows)) or matrix.numel() <= 1


def target_for(hardware: HardwareProfile) -> Target:
    """The rules for a machine."""
    return CudaTarget(hardware) if hardware.device_kind == "cuda" else CpuTarget(hardware)
