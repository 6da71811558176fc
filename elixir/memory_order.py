"""The order in which the elements of a dense tensor lie in memory: contiguous, channels last, transposed.

An order lists dimensions, from the one with the widest strides to the one whose elements are neighbours. None is
the order of the dimensions themselves, as in a contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = tuple[int, ...]


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor lie next to each other, in whatever order: without gaps, and none twice."""
    expected = 1
    for dim in reversed(_nested(shape, stride)):
        if stride[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def order_of(shape: Sequence[int], stride: Sequence[int]) -> Order | None:
    """The order of a dense tensor."""
    nested = _nested(shape, stride)
    if nested == sorted(nested):
        return None
    single = (dim for dim, size in enumerate(shape) if size == 1)
    return (*single, *nested)


def flattened(values: torch.Tensor, order: Order | None) -> torch.Tensor:
    """The elements one after the other in an order: a flat view if they lie so, otherwise a copy."""
    return (values if order is None else values.permute(order)).reshape(-1)


def shaped(flat: torch.Tensor, shape: Sequence[int], order: Order | None) -> torch.Tensor:
    """The inverse of `flattened`: a view in a shape."""
    if order is None:
        return flat.view(tuple(shape))
    back = sorted(range(len(order)), key=lambda place: order[place])
    return flat.view([shape[dim] for dim in order]).permute(back)


def _nested(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dimensions that have strides to speak of, the widest first."""
    if 0 in shape:
        return []
    return sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -stride[dim])
