"""Segments of a chunk's shard, and a step of a torch optimizer over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elixir.memory_order import Order, shaped


@dataclass
class Segment:
    """A stretch of one parameter inside this rank's shard."""

    name: str
    group: int
    start: int
    """In elements from the start of the shard."""
    place: int
    """Position of its parameter among those of the chunk."""
    weights: nn.Parameter
    """The tensor that the chunk's optimizer steps: float32 master weights, or the weights themselves."""
    source: nn.Parameter
    """The model's parameter."""
    version: int
    """Its version when the segment was made."""
    order: Order | None = None
    """In which the elements of `weights` lie, if that is the parameter itself."""


Arrived = list[tuple[Segment, torch.Tensor]]
"""Segments that got a gradient, with it."""


def step_segments(
    optimizer: torch.optim.Optimizer, segments: Sequence[Segment], arrived: Arrived, factor: float | torch.Tensor
) -> None:
    """A step of an optimizer over `segments`, of which some got a gradient."""
    before = [segment.weights.grad for segment in segments]  # of ordinary parameters, which keep theirs
    for segment in segments:
        segment.weights.grad = None
    for segment, gradient in arrived:
        # In float32 without a factor the gradient itself is stepped with, as plain PyTorch would.
        value = gradient.to(segment.weights.dtype)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            value = value * factor if value is gradient else value.mul_(factor)
        segment.weights.grad = shaped(value, segment.weights.shape, segment.order)
    optimizer.step()
    for segment, kept in zip(segments, before, strict=True):
        segment.weights.grad = kept
