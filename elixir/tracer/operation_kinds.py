"""The bound of an operator, by its name and its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from elixir.step_trace import Operation, OperatorKind
from elixir.units import dtype_name

aten = torch.ops.aten

FEW_ROWS = 64
"""Products with no more rows, or columns, are bound by reading the weight."""
LONG = 8**0.5
"""Ratio of lengths from which on a product counts as 8 : 1, as measured; below, it counts as 1 : 1."""

PRODUCTS = {  # -> position of the first factor, which the second follows
    aten.mm: 0,
    aten.bmm: 0,
    aten._grouped_mm: 0,
    aten.addmm: 1,
    aten.baddbmm: 1,
}
_ALLOCATIONS = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided})
_ACTIVATIONS = ("gelu", "silu", "relu", "tanh", "sigmoid", "mish", "hardswish", "softplus", "elu", "glu", "erf", "exp")
_REDUCTIONS = (
    "softmax", "norm", "nll_loss", "sum", "mean", "var", "std", "amax", "amin", "max", "min", "argmax", "cumsum",
    "logsumexp", "topk", "sort", "loss",
)  # fmt: skip


def operation_of(
    func: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    flops: int,
    row_bytes: int = 1,
) -> Operation | None:
    """The work of one call; None where it only allocates.

    Args:
        func: the operator.
        inputs: its tensor arguments, in order.
        outputs: its results.
        flops: by PyTorch's formulas.
        row_bytes: products whose rows start at multiples of it are as fast as any of their shape.
    """
    packet = func._overloadpacket
    tensors = outputs or inputs
    if packet in _ALLOCATIONS or not tensors:
        return None
    dtype, moved_bytes = dtype_name(tensors[0].dtype), sum(tensor.nbytes for tensor in (*inputs, *outputs))
    if not flops:
        return Operation(_memory_bound(packet.__name__), dtype, 0, moved_bytes)
    if "attention" in packet.__name__:
        kind: OperatorKind = "attention_backward" if "backward" in packet.__name__ else "attention"
        return Operation(kind, dtype, flops, moved_bytes)
    at = PRODUCTS.get(packet)
    if at is None:
        return Operation("square", dtype, flops, moved_bytes)
    if any(_row_bytes(tensor) % row_bytes for tensor in (*inputs[at : at + 2], *outputs)):
        return Operation("unaligned", dtype, flops, moved_bytes)
    rows, inner = inputs[at].shape[-2:]
    return Operation(product_class(int(rows), int(inner), int(tensors[0].shape[-1])), dtype, flops, moved_bytes)


def product_class(rows: int, inner: int, columns: int) -> OperatorKind:
    """The measured class that a product of ``rows x inner`` by ``inner x columns`` is nearest to."""
    shorter, longer = sorted((rows, columns))
    if shorter <= FEW_ROWS:
        return "skinny"
    if inner >= LONG * longer:
        return "deep"
    return "tall" if longer >= LONG * max(inner, shorter) else "square"


def _row_bytes(matrix: torch.Tensor) -> int:
    """Bytes from one row of a matrix to the next, or from one column to the next where columns are contiguous."""
    strides = [stride for size, stride in zip(matrix.shape[-2:], matrix.stride()[-2:], strict=True) if size > 1]
    return max(strides, default=0) * matrix.itemsize if len(strides) > 1 else 0


@lru_cache(maxsize=4096)
def passing(dtype: torch.dtype, moved_bytes: int) -> Operation:
    """An operator that only reads and writes, such as a sum in place."""
    return Operation("elementwise", dtype_name(dtype), 0, moved_bytes)


@cache
def _memory_bound(name: str) -> OperatorKind:
    words = name.strip("_")
    if any(words.startswith(word) or f"_{word}" in words for word in _REDUCTIONS):
        return "reduction"
    if any(words.startswith(word) for word in _ACTIVATIONS):
        return "activation"
    return "elementwise"
