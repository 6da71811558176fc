"""`Segment`: the part of one parameter in this rank's shard of a chunk, which an optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, ShardPart


@dataclass
class Segment:
    """The part of one parameter inside this rank's shard."""

    held: ShardPart
    """Its place in the parameter, in the chunk and in the shard."""
    group: int
    weights: nn.Parameter
    """The flat tensor that is stepped: a part of the master weights, or of the weights themselves."""
    version: int
    """The version of the parameter when the segment was created."""

    def __post_init__(self) -> None:
        slot, part = self.held.slot, self.held.part
        self.slot, self.name, self.source = slot, slot.name, slot.parameter
        self.place, self.first, self.part, self.start = self.held.place, self.held.first, part, part.start


Arrived = list[tuple[Segment, torch.Tensor]]
"""The segments that got a gradient, each with it."""


def cut_segments(chunk: Chunk, master: torch.Tensor, group_of: Mapping[nn.Parameter, int]) -> list[Segment]:
    """The segments of this rank's shard that an optimizer steps, in order.

    Args:
        chunk: of the shard.
        master: the flat shard of weights or masters.
        group_of: the optimizer's parameters, with the number of their group.
    """
    segments = []
    for held in chunk.held.values():
        parameter = held.slot.parameter
        if parameter in group_of and parameter.requires_grad:
            weights = nn.Parameter(master[held.part], requires_grad=True)
            segments.append(Segment(held, group_of[parameter], weights, parameter._version))
    return segments


def own_ranges(chunk: Chunk, group_of: Mapping[nn.Parameter, int]) -> list[slice]:
    """The ranges of this rank's shard with parameters of an optimizer, frozen ones included, in order.

    A gap between parameters belongs to the parameter before it. So several optimizers that have all parameters of the
    shard divide it, and together keep as much as one would.

    Args:
        chunk: of the shard.
        group_of: the optimizer's parameters, with the number of their group.
    """
    ranges: list[slice] = []
    start, held = 0, list(chunk.held.values())
    for each, after in zip_longest(held, held[1:]):  # a shard of padding alone holds none
        stop = chunk.shard_numel if after is None else after.part.start
        if each.slot.parameter in group_of:
            joins = bool(ranges) and ranges[-1].stop == start
            ranges.append(slice(ranges.pop().start if joins else start, stop))
        start = stop
    return ranges
