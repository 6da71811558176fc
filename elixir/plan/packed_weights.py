"""Frozen weights that are packed, such as two numbers of 4 bits in a byte, in words: which bytes are, which are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from elixir.units import dtype_bytes, format_bytes

PACKED_DTYPES = ("uint8", "int8")
"""The dtypes of packed numbers: an element of theirs is not one parameter, or not without its scale."""


class Weight(NamedTuple):
    """A parameter, as traces and plans know it."""

    name: str
    dtype: str
    numel: int
    trainable: bool

    @property
    def bytes(self) -> int:
        """Bytes, without what shares a chunk or a page with them."""
        return self.numel * dtype_bytes(self.dtype)


def numel_text(weights: Iterable[Weight]) -> str:
    """The number of parameters, and the bytes of those that are packed, whose elements are not parameters."""
    numel = packed_bytes = 0
    for weight in weights:
        packed = weight.dtype in PACKED_DTYPES
        numel, packed_bytes = numel + weight.numel * (not packed), packed_bytes + weight.bytes * packed
    return f"{numel:,}" + (f" and {format_bytes(packed_bytes)} packed" if packed_bytes else "")


def packed_text(weights: Sequence[Weight], form: str | None) -> str:
    """The bytes of frozen weights by how they are held; empty if none is packed and nobody asked for it.

    Args:
        weights: all parameters.
        form: as `StepShape.quantised` has it, in 4 bits; None: the dtypes say what is packed.
    """
    frozen = [weight for weight in weights if not weight.trainable]
    packed, others = Counter[str](), Counter[str]()
    for weight in frozen:
        (packed if weight.dtype in PACKED_DTYPES else others)[weight.dtype] += weight.bytes
    if not packed and form is None:
        return ""
    parts = [f"{format_bytes(size)} in {dtype}" for dtype, size in packed.most_common()]
    if form is not None:
        parts = [f"{format_bytes(packed.total())} in 4 bits ({form})"]
    parts += [f"{format_bytes(size)} in {dtype}" for dtype, size in others.most_common()]
    experts = sum(weight.bytes for weight in frozen if "expert" in weight.name and weight.dtype not in PACKED_DTYPES)
    why = "; expert weights are 3-D parameters, which bitsandbytes does not quantise"
    return f"frozen: {', '.join(parts)}{why * (form is not None and 2 * experts > others.total())}"
