"""Segments: the parts of parameters of which a rank's shard of a chunk consists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Held
from elixir.memory_order import Order


@dataclass
class Segment:
    """The part of one parameter inside this rank's shard."""

    held: Held
    """Where it lies in its parameter, in the chunk and in the shard."""
    group: int
    weights: nn.Parameter
    """The tensor that the chunk's optimizer steps: float32 master weights, or the weights themselves."""
    version: int
    """The version of the parameter when the segment was made."""
    order: Order | None = None
    """In which the elements of `weights` lie, if that is the parameter itself."""

    def __post_init__(self) -> None:
        slot, part = self.held.slot, self.held.part
        self.slot, self.name, self.source = slot, slot.name, slot.parameter
        self.place, self.first, self.part, self.start = self.held.place, self.held.first, part, part.start


Arrived = list[tuple[Segment, torch.Tensor]]
"""Segments that got a gradient, with it."""


def cut_segments(
    chunk: Chunk, master: torch.Tensor, group_of: Mapping[nn.Parameter, int], *, ordinary: bool = False
) -> list[Segment]:
    """The segments of this rank's shard that an optimizer steps, in order.

    Args:
        chunk: of the shard.
        master: the flat shard that is stepped.
        group_of: the optimizer's parameters, with the number of their group.
        ordinary: whether the model's own parameters are stepped, as plain PyTorch would.
    """
    segments = []
    for held in chunk.held.values():
        slot, group = held.slot, group_of.get(held.slot.parameter)
        if group is None or not slot.parameter.requires_grad:
            continue
        weights, order = slot.parameter, slot.order  # plain PyTorch's own: same kernel, same bits
        if not (ordinary and slot.shape):
            # Also for a weight without dimensions: its moments would look like a count of steps.
            weights, order = nn.Parameter(master[held.part], requires_grad=True), None
        segments.append(Segment(held, group, weights, slot.parameter._version, order))
    return segments
