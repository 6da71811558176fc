"""Measures memory that CPU kernels allocate beyond their results, by the allocator of this machine.

oneDNN copies operands of convolutions to layouts that depend on the processor, and kernels of linear algebra keep
workspaces that no schema mentions. No formula follows all that. So a trace for the CPU runs such an operator once for
each signature, on made-up values and outside of every mode, while PyTorch's profiler lists what is allocated. What an
operator takes that is too large to be run is not counted, and said.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from elixir.torch_private import allocations, onednn_is_enabled, tree_flatten, tree_unflatten
from elixir.tracer.device.common.target import HALF

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


class KernelMemory:
    """Allocations of kernels here, each signature observed once in the life of the process."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def peak_bytes(self, func: Any, args: Any, kwargs: Any) -> int | None:
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
        found = self._known.get(key)
        if found is None and _can_run(func, args, kwargs, leaves):
            found = _observe(func, leaves, structure)
        if found is not None:  # otherwise something may only be in the way now, such as a profiler
            self._known[key] = found
        return found


KERNELS_HERE = KernelMemory()
"""The one of this process: its libraries always allocate the same."""


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
