"""Segments: the parts of parameters of which a rank's shard of a chunk consists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from elixir.chunk.chunk import Slot
from elixir.memory_order import Order


@dataclass
class Segment:
    """The part of one parameter inside this rank's shard."""

    slot: Slot
    """The parameter in its chunk."""
    place: int
    """Position of the parameter among those of the chunk."""
    group: int
    start: int
    """In elements from the start of the shard."""
    weights: nn.Parameter
    """The tensor that the chunk's optimizer steps: float32 master weights, or the weights themselves."""
    first: int
    """The element of the flattened parameter with which it begins."""
    version: int
    """That of the parameter when the segment was made."""
    order: Order | None = None
    """In which the elements of `weights` lie, if that is the parameter itself."""

    @property
    def name(self) -> str:
        """That of the parameter."""
        return self.slot.name

    @property
    def source(self) -> nn.Parameter:
        """The model's parameter."""
        return self.slot.parameter

    @property
    def part(self) -> slice:
        """Its elements in the shard."""
        return slice(self.start, self.start + self.weights.numel())


Arrived = list[tuple[Segment, torch.Tensor]]
"""Segments that got a gradient, with it."""
