"""Rules that make meta tensors behave as the target device would.

Meta runs the device-independent part of PyTorch. The part that differs per device, and matters for memory, is here and
in `CudaTarget` and `CpuTarget`: whether dropout keeps a mask or a noise tensor, how sizes are rounded, how attention is
computed, what libraries keep for themselves, how the optimizer runs, and what kernels hold only while they run. Each
rule names its source; `docs/design/tracer.md` says which ones a measurement has confirmed.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from elixir.errors import InputError, unknown_name
from elixir.hardware.profile import HardwareProfile
from elixir.torch_private import suggest_memory_format
from elixir.tracer.ledger import Ledger

aten = torch.ops.aten

AttentionKernel = Literal["cudnn", "flash", "efficient", "cpu_flash", "math"]
OptimizerKernel = Literal["for-loop", "foreach", "fused"]

_MATRIX_OPERANDS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
"""Product -> the arguments that go to a BLAS as they are, if their layout allows."""

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


HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Attention:
    """The facts on which the choice of an attention kernel depends."""

    dtype: torch.dtype
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    mask_shape: tuple[int, ...] | None
    mask_needs_grad: bool
    dropout: float
    is_causal: bool
    enable_gqa: bool
    last_dim_contiguous: bool = True
    mask_last_dim_contiguous: bool = True

    @property
    def has_mask(self) -> bool:
        """Whether there is a mask or an additive bias."""
        return self.mask_shape is not None

    @property
    def broadcasts(self) -> bool:
        """Whether batches or heads differ where they are not said to be grouped: only the math form takes that."""
        (batch, heads), key, value = self.query_shape[:2], self.key_shape[:2], self.value_shape[:2]
        grouped = self.enable_gqa and heads % key[1] == heads % value[1] == 0
        return key[0] != batch or value[0] != batch or not (grouped or heads == key[1] == value[1])


class Target(ABC):
    """The device that a trace pretends to run on; this base has the rules of every device.

    Args:
        hardware: profile of the machine, of which the compute capability is used.
    """

    kind: Literal["cuda", "cpu"]
    matrix_libraries = 0
    """How many libraries keep a workspace for matrix products."""
    capability: tuple[int, int] | None = None
    """Compute capability of a CUDA device."""
    optimizer_kernel: OptimizerKernel
    """How `torch.optim` runs by default."""
    product_row_bytes = 1
    """Matrix products whose rows start at multiples of so many bytes are as fast as any of their shape."""
    counts_host_tensors = False
    """Whether tensors that the step makes on the CPU are in the memory that is being predicted."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self.uncounted: dict[Any, None] = {}
        """Operators of the step that allocate more than their results and than is known."""

    def round_bytes(self, nbytes: int) -> int:
        """Bytes that the allocator takes for a request of `nbytes`."""
        return nbytes

    @abstractmethod
    def attention_kernel(self, call: Attention) -> AttentionKernel:
        """The kernel `scaled_dot_product_attention` chooses."""

    def matmul_workspace_bytes(self, func: Any, args: Any) -> tuple[int, ...]:
        """Bytes that matrix libraries take from PyTorch's allocator at a product, if it is the first on a thread.

        One number for each library that the product asks, of the `matrix_libraries` that there are.
        """
        return ()

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
            # It makes masks of scores and of rows that are -inf, and a zero for those rows (`attention.cpp`).
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


def _blas_reads(matrix: torch.Tensor) -> bool:
    """Whether rows or columns lie one after the other without overlap."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows)) or matrix.numel() <= 1


_COUNTER_BYTES = 4
"""A number that an optimizer keeps for each weight, such as its steps, is a float32."""


class _Memory(NamedTuple):
    """The memory of an optimizer with torch's defaults, SGD's with momentum: copies of weights, unless said
    otherwise. Temporaries are those of `step()`, as observed on the CPU with torch 2.13."""

    states: int
    """States of the size of their weight."""
    counters: int
    """Numbers kept for each weight."""
    foreach: int
    """Temporaries held of all weights at once."""
    loop: int
    """Temporaries of the weight that a loop steps."""
    held: int
    """Temporaries that the loop still holds of the weight before it."""


_MEMORY = {
    "Adam": _Memory(2, 1, 1, 2, 1),
    "AdamW": _Memory(2, 1, 1, 2, 1),
    "SGD": _Memory(1, 0, 0, 0, 0),
    "RMSprop": _Memory(1, 1, 1, 1, 1),
    "Adagrad": _Memory(1, 1, 2, 1, 1),
    "NAdam": _Memory(2, 2, 1, 2, 1),
    "RAdam": _Memory(2, 1, 1, 2, 0),
    "Adamax": _Memory(2, 1, 1, 1, 0),
    "Adadelta": _Memory(2, 1, 2, 2, 1),
}
"""By the name of a class in `torch.optim`."""


class OptimizerPhase(NamedTuple):
    """The result of the optimizer's part of a step."""

    description: str
    """Class and kernel, such as ``AdamW (foreach)``; ``none`` for a step without one."""
    state_bytes: int
    """Exact bytes of the states on the device."""


def run_optimizer(
    name: str | None, kernel: OptimizerKernel | None, parameters: list[nn.Parameter], ledger: Ledger, target: Target
) -> OptimizerPhase:
    """Books the states and the temporaries of one `step()` of a steady run, of the weights that have gradients.

    Raises:
        InputError: `torch.optim` has no class of this name, in any case, or the class has no such kernel.
    """
    if name is None:
        return OptimizerPhase("none", 0)
    named = {each.lower(): each for each in _MEMORY}
    if name.lower() not in named:
        raise unknown_name("optimizer", name, named)
    name = named[name.lower()]
    kernel, memory = _choose_kernel(name, kernel, target), _MEMORY[name]
    # Fused kernels keep their counters on the device, others on the host.
    counters = memory.counters if kernel == "fused" or target.counts_host_tensors else 0
    exact = [parameter.nbytes for parameter in parameters if parameter.grad is not None]
    sizes = list(map(target.round_bytes, exact))
    counted_bytes = target.round_bytes(_COUNTER_BYTES) * counters * len(sizes)
    ledger.add_bytes(memory.states * sum(sizes) + counted_bytes, "optimizer", "", "step")
    if kernel == "foreach":
        ledger.touch(memory.foreach * sum(sizes), "", "step")
    elif kernel == "for-loop":
        most = max(memory.held * before + memory.loop * size for before, size in pairwise([0, *sizes]))
        ledger.touch(most, "", "step")
    state_bytes = memory.states * sum(exact) + _COUNTER_BYTES * counters * len(exact)
    return OptimizerPhase(f"{name} ({kernel})", state_bytes)


def _choose_kernel(name: str, kernel: OptimizerKernel | None, target: Target) -> OptimizerKernel:
    """The kernel of the optimizer: the argument, or the default of `torch.optim` on the target."""
    options = inspect.signature(getattr(torch.optim, name)).parameters
    if kernel is None:
        return target.optimizer_kernel if target.optimizer_kernel in (*options, "for-loop") else "for-loop"
    if kernel != "for-loop" and kernel not in options:
        raise InputError(f"torch.optim.{name} has no {kernel} kernel; leave the kernel to torch")
    return kernel
