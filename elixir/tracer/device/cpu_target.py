"""The rules of the CPU: what its kernels hold while they run, and which of them are observed.

oneDNN copies operands of convolutions to layouts that depend on the processor, and kernels of linear algebra keep
workspaces that no schema mentions. No formula follows all that. So a trace for the CPU runs such an operator once for
each signature, on made-up values and outside of every mode, while PyTorch's profiler lists what is allocated. What an
operator takes that is too large to be run is not counted, and said.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from elixir.hardware.profile import HardwareProfile
from elixir.torch_private import allocations, onednn_is_enabled, tree_flatten, tree_unflatten
from elixir.tracer.device.target import HALF, Attention, AttentionKernel, Target

aten = torch.ops.aten

MAX_RUN_BYTES = 1 << 28
"""Most bytes of the operands of an operator that is run."""
MAX_RUN_FLOPS = 4e9
"""Most FLOPs of an operator that is run: about a tenth of a second of one core."""

PLAIN = frozenset(
    {
        aten._grouped_mm.default,
        aten._to_copy.default, aten.clone.default, aten.copy.default, aten.cat.default, aten.stack.default,
        aten.constant_pad_nd.default, aten.repeat.default, aten.roll.default, aten.flip.default,
        aten.embedding.default, aten.embedding_dense_backward.default, aten.index.Tensor, aten.index_select.default,
        aten.gather.default, aten.index_put.default, aten.scatter_add.default, aten.scatter.value, aten.scatter.src,
        aten.index_add.default, aten.where.self, aten.tril.default, aten.triu.default, aten.cumsum.default,
        aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default,
        aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
        aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
        aten.native_batch_norm.default, aten.native_batch_norm_backward.default,
        aten.nll_loss_forward.default, aten.nll_loss_backward.default,
        aten.slice_backward.default, aten.select_backward.default, aten.arange.default, aten.arange.start,
        aten.arange.start_step, aten._ctc_loss.default, aten._ctc_loss_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)  # fmt: skip
"""Operators whose allocations are known from their sources; `CpuTarget` counts those that are not their results."""

_NEW = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "new", "scalar", "normal", "eye", "linspace"})
"""First words of the names of operators that only make tensors."""
_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim})


def is_plain(func: Any, args: Any) -> bool:
    """Whether an operator allocates its results only, or a rule of `CpuTarget` gives the rest."""
    if func in _PRODUCTS:
        # oneDNN has a scratchpad for half precision; PyTorch's BLAS has none for other dtypes.
        return args[-1].dtype not in HALF
    if func in PLAIN or func.namespace != "aten" or func._schema.is_mutable:
        return True
    if torch.Tag.pointwise in func.tags:
        return True
    if func in _SUMS:
        return bool(args[0].is_floating_point())
    return func._schema.name.removeprefix("aten::").partition("_")[0].partition(".")[0] in _NEW


KERNELS_HERE: dict[Any, int] = {}
"""Signature of a call -> what it takes: observed once, as the libraries of this process always allocate the same."""


def peak_bytes_here(func: Any, args: Any, kwargs: Any) -> int | None:
    """The most that a call of an operator takes while it runs, its results included; None if nobody knows.

    Args:
        func: returns new tensors.
        args: its arguments, tensors on meta among them; of these only sizes, strides and dtypes count.
        kwargs: as well.
    """
    leaves, structure = tree_flatten((args, kwargs))
    key = (
        func, torch.get_num_threads(), onednn_is_enabled(), torch.are_deterministic_algorithms_enabled(),
        str(structure), tuple(_signature(leaf) for leaf in leaves),
    )  # fmt: skip
    found = KERNELS_HERE.get(key)
    if found is None and _can_run(func, args, kwargs, leaves):
        found = _observe(func, leaves, structure)
    if found is not None:  # otherwise something may only be in the way now, such as a profiler
        KERNELS_HERE[key] = found
    return found


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return type(leaf), str(leaf)


def _can_run(func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> bool:
    """Whether a call is small enough; it has no FLOPs where PyTorch has no formula."""
    if sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)) > MAX_RUN_BYTES:
        return False
    formula = flop_registry.get(func._overloadpacket)
    flops = 0 if formula is None else formula(*args, **kwargs, out_val=func(*args, **kwargs))
    return bool(max(flops, 1) <= MAX_RUN_FLOPS)


def _observe(func: Any, leaves: list[Any], structure: Any) -> int | None:
    """The operator, run on made-up values; None if it takes none such, or something else is profiling this thread."""
    generator = torch.Generator()
    try:
        args, kwargs = tree_unflatten([_made_up(leaf, generator) for leaf in leaves], structure)
        if torch.Tag.nondeterministic_seeded in func.tags:
            if not any(argument.name == "generator" for argument in func._schema.arguments):
                return None  # it would draw from PyTorch's generator, which a trace leaves alone
            kwargs["generator"] = generator
        func(*args, **kwargs)  # a first call may allocate memory that stays
        found = allocations(lambda: func(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    return None if found is None else max(itertools.accumulate(found[1]), default=0)


def _made_up(leaf: Any, generator: torch.Generator) -> Any:
    """Numbers between 0 and 1 for floating tensors, zeros for indices; on the CPU."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")
    return made.uniform_(generator=generator) if leaf.is_floating_point() else made.zero_()


class CpuTarget(Target):
    """The CPU: every rule of it can be checked byte for byte against a real run."""

    kind = "cpu"
    counts_host_tensors = True
    optimizer_kernel = "for-loop"

    def __init__(self, hardware: HardwareProfile) -> None:
        super().__init__(hardware)
        self._threads = torch.get_num_threads()

    def attention_kernel(self, call: Attention) -> AttentionKernel:
        """Chooses by the rules of the CPU."""
        return chosen_on_cpu(call)

    def transient_bytes(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:
        """Buffers of each thread, and copies that kernels make; as many threads as PyTorch has here.

        The rules follow `Copy.cpp`, `Embedding.cpp`, `FlashAttentionKernel.cpp`, `layer_norm_kernel.cpp`,
        `LossCTC.cpp`, `Normalization.cpp` and `SoftMax.cpp`; operators for which there is none are run and observed
        (`peak_bytes_here`).
        """
        if func in _COPIES:
            return _transposed_tile(source=args[_COPIES[func]], copy=outputs[0])
        if torch.Tag.pointwise in func.tags:
            return _promoted_bytes(func, args)
        if not is_plain(func, args):
            peak_bytes = peak_bytes_here(func, args, kwargs)
            if peak_bytes is None:
                self.uncounted[func] = None
                return super().transient_bytes(func, args, kwargs, outputs)
            return max(0, peak_bytes - sum(output.untyped_storage().nbytes() for output in outputs))
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return _cpu_flash_buffers(args[0], args[1], self._threads, backward=False)
        if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            buffers = _cpu_flash_buffers(args[1], args[2], self._threads, backward=True)
            return _contiguous_copy(args[0].transpose(1, 2)) + buffers
        if func is aten.native_layer_norm_backward.default:
            sums: int = 2 * self._threads * math.prod(args[2]) * args[0].itemsize
            return _contiguous_copy(args[0]) + sums
        if func in _CONTIGUOUS_INPUTS:
            return sum(_contiguous_copy(item) for item in args[: _CONTIGUOUS_INPUTS[func]])
        if func is aten._ctc_loss_backward.default:
            return int(args[6].nbytes)  # the betas, as large as the alphas (`LossCTC.cpp`)
        if func is aten.native_batch_norm_backward.default:
            return int(args[1].nbytes)  # a second gradient of the input, of which one is thrown away
        return super().transient_bytes(func, args, kwargs, outputs)

    def results(self, func: Any, args: Any, result: Any) -> Any:
        """Layer norm keeps its statistics in the dtype of input and weight, if they agree (`layer_norm_kernel.cpp`)."""
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


def _contiguous_copy(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.itemsize


def chosen_on_cpu(call: Attention) -> AttentionKernel:
    """Flash where nothing is dropped, heads are equally wide and the mask is a constant (`sdp_utils_cpp.cpp`)."""
    same_width = call.query_shape[-1] == call.key_shape[-1] == call.value_shape[-1]
    plain = call.dropout == 0.0 and not call.mask_needs_grad and call.last_dim_contiguous
    if len(call.query_shape) == 4 and plain and same_width and not call.broadcasts:
        return "cpu_flash"
    return "math"
