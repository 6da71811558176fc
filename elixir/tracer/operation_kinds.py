"""The work of an operator: FLOPs, bytes, and what bounds it, by its name and its shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from elixir.step_trace import Operation, OperatorKind
from elixir.torch_private import tree_leaves
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

_COUNTS_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
"""Operators without a formula of PyTorch's -> those with the same products."""

_SHARES_HEADS = frozenset(
    getattr(aten, f"_scaled_dot_product_{kernel}_attention{direction}")
    for kernel, direction in itertools.product(("efficient", "flash", "cudnn"), ("", "_backward"))
) | frozenset(_COUNTS_AS)
"""Attention kernels that take keys and values which heads share; the query, after the gradient in backward, comes
before them."""


def _formulas_take_groups() -> bool:
    """Whether this PyTorch counts attention whose heads share keys and values; 2.11 refuses to."""
    try:
        return bool(sdpa_flop_count((1, 2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)))
    except AssertionError:
        return False


_FORMULAS_TAKE_GROUPS = _formulas_take_groups()


def operation_of(func: Any, args: Any, kwargs: Any, result: Any, row_bytes: int) -> Operation | None:
    """The work of one call; None where it only allocates.

    Args:
        func: the operator.
        args, kwargs: its arguments.
        result: what it gave.
        row_bytes: products whose rows start at multiples of it are as fast as any of their shape.
    """
    packet = func._overloadpacket
    inputs, outputs = _tensors_of((args, kwargs)), _tensors_of(result)
    tensors = outputs or inputs
    if packet in _ALLOCATIONS or not tensors:
        return None
    dtype, moved_bytes = dtype_name(tensors[0].dtype), sum(tensor.nbytes for tensor in (*inputs, *outputs))
    attention = attention_of_documents(func, args, kwargs)
    if attention is not None:
        return Operation(attention.kind, dtype, attention.flops(), moved_bytes)
    flops = count_flops(func, args, kwargs, result)
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
    rows, inner, columns = (*inputs[at].shape[-2:], tensors[0].shape[-1])
    if packet is aten._grouped_mm:
        rows, inner, columns = _part_of_a_group(inputs[0], inputs[1], outputs[0])
    return Operation(product_class(int(rows), int(inner), int(columns)), dtype, flops, moved_bytes)


def _part_of_a_group(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor) -> tuple[int, int, int]:
    """Rows, inner length and columns that the product of one group has on the average, in a product of groups.

    The groups divide one dimension: rows if `second` alone has a matrix for each, as in the forward of experts; the
    inner length if the result alone has, as for the gradients of their weights.
    """
    groups = next(item.shape[0] for item in (second, first, result) if item.dim() == 3)
    rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    if result.dim() == 2 and second.dim() == 3:
        rows = -(-rows // groups)
    elif result.dim() == 2:
        columns = -(-columns // groups)
    elif first.dim() == 2:
        inner = -(-inner // groups)
    return rows, inner, columns


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]


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


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations by PyTorch's own formulas (`torch.utils.flop_counter`), and of grouped products, for
    which it has none; 0 for other operators without one.

    Causal attention counts the scores that a query may see, about half: its kernels skip the blocks above the diagonal
    (`num_keys` in `FlashAttentionKernel.cpp` and `kernel_forward.h`, `n_block_max` of flash). A causal mask that comes
    as a tensor counts in full, as kernels do not look into it.
    """
    packet = func._overloadpacket
    if packet is aten._grouped_mm:  # each row, or column, or pair of them is a part of one group's product
        first, second = args[:2]
        products = first.shape[0] if first.dim() == second.dim() == 3 else 1
        return int(2 * products * first.shape[-2] * first.shape[-1] * second.shape[-1])
    formula = flop_registry.get(_COUNTS_AS.get(packet, packet))
    if formula is None:
        return 0
    if packet not in _SHARES_HEADS:
        return int(formula(*args, **kwargs, out_val=result))
    query_at = int(packet.__name__.endswith("backward"))
    queries, keys = args[query_at].shape[-2], args[query_at + 1].shape[-2]
    if not _FORMULAS_TAKE_GROUPS:
        args = _ungrouped(args, query_at)
    flops = int(formula(*args, **kwargs, out_val=result))
    return flops * causal_scores(queries, keys) // (queries * keys) if _is_causal(func, args, kwargs) else flops


_BEGINS = ("cum_seq_q", "cu_seq_q", "cu_seqlens_q")
"""Names that flash attention gives to the first tokens of documents: PyTorch's two and the package's."""


@cache
def names_if_of_documents(func: Any) -> tuple[str, ...]:
    """The arguments of an operator that computes flash attention document by document; of any other, none."""
    names = tuple(argument.name for argument in func._schema.arguments)
    wanted = _BEGINS, ("query", "q"), ("max_q", "max_seqlen_q"), ("is_causal", "causal")
    known = all(map(set(names).intersection, wanted))
    return names if known and "scaled_dot_product" not in func._schema.name else ()


class AttentionOfDocuments(NamedTuple):
    """A call of flash attention over documents that lie one after the other, or over samples of one length."""

    kind: OperatorKind
    query: torch.Tensor
    """(tokens, heads, width), or (samples, tokens, heads, width)."""
    key: torch.Tensor
    value: torch.Tensor
    begins: torch.Tensor | None
    """The first token of each document, then the end; None for samples."""
    longest: int
    is_causal: bool
    window: tuple[int, int]
    """Tokens that each sees before and after itself; -1 for all."""

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.query) if self.begins is None else self.begins.numel() - 1

    def flops(self, begins: torch.Tensor | None = None) -> int:
        """Floating-point operations of the scores inside of documents.

        Two products in forward and five in backward, three of them as wide as the keys, as
        `torch.utils.flop_counter` counts them.

        Args:
            begins: the values of `begins`; None if unknown: then every document is as long as the longest may be.
        """
        lengths: Sequence[int] = [self.longest] * self.documents
        if self.begins is not None and begins is not None:
            lengths = begins.diff().tolist()
        more = self.key.shape[-3] - self.query.shape[-3] if self.begins is None else 0
        heads, wide, width = self.query.shape[-2], self.query.shape[-1], self.value.shape[-1]
        backward = self.kind == "attention_backward"
        each = 2 * (3 * wide + 2 * width if backward else wide + width)
        return heads * each * sum(self._scores(length, more) for length in lengths)

    def _scores(self, tokens: int, more: int) -> int:
        """Scores of one head, if before the tokens there are `more` keys, as in a cache."""
        before, after = self.window
        causal = self.is_causal or after == 0
        seen = tokens + more if before < 0 else min(tokens + more, before + 1 + (0 if causal else max(after, 0)))
        if not causal:
            return tokens * seen
        fewer = max(0, min(tokens, seen - more))  # the first tokens, of which each sees one key more than the last
        return fewer * more + causal_scores(fewer, fewer) + (tokens - fewer) * seen


def attention_of_documents(func: Any, args: Any, kwargs: Any) -> AttentionOfDocuments | None:
    """A call as one of flash attention over documents; None if it is none."""
    names = names_if_of_documents(func)
    if not names:
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given.get(name, given.get(name[0])) for name in ("query", "key", "value"))
    begins = next(given[name] for name in _BEGINS if name in names)
    longest = given.get("max_q", given.get("max_seqlen_q"))
    sides = given.get("window_size") or [given.get(f"window_size_{side}") for side in ("left", "right")]
    before, after = (-1 if side is None else int(side) for side in sides)
    backward = "backward" in func._overloadpacket.__name__
    kind: OperatorKind = "attention_backward" if backward else "attention"
    causal = bool(given.get("is_causal", given.get("causal", False)))
    return AttentionOfDocuments(kind, query, key, value, begins, int(longest), causal, (before, after))


def causal_scores(queries: int, keys: int) -> int:
    """The number of scores of one head if query i sees keys 0 to i."""
    seeing_fewer = min(queries, keys)
    return seeing_fewer * (seeing_fewer + 1) // 2 + (queries - seeing_fewer) * keys


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """The argument `is_causal` of a call of attention, False by default."""
    at = next(at for at, argument in enumerate(func._schema.arguments) if argument.name == "is_causal")
    return bool(args[at] if at < len(args) else kwargs.get("is_causal", False))


def _ungrouped(args: Any, query_at: int) -> tuple[Any, ...]:
    """Arguments of attention in which every head of the query has keys and values: the same products, so the same
    count."""
    query, *shared = args[query_at : query_at + 3]
    each = [torch.empty(item.shape[:1] + query.shape[1:2] + item.shape[2:], device="meta") for item in shared]
    return (*args[: query_at + 1], *each, *args[query_at + 3 :])


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
