"""What holds a chunk's gradients: while they arrive, while they leave, and at the home of the optimizer states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.lanes import Ticket


@dataclass
class GradShard:
    """This rank's part of one chunk's gradient, where the optimizer states live."""

    memory: torch.Tensor
    """On the device only from the first gradient after a step on, where activations leave room; else empty."""
    holds: bool = False
    """Whether it holds a gradient, so that the next one is added."""
    ready: Ticket | None = None
    arrived: set[str] = field(default_factory=set)
    """Names of the parameters that got a gradient on this rank since the last step."""
    dropped: set[str] = field(default_factory=set)
    """Names of the parameters whose part counts as zero, and is made so when the next gradient is added."""


@dataclass
class OpenChunk:
    """A chunk whose gradients are arriving."""

    block: torch.Tensor
    """As many elements as the chunk has."""
    memory: torch.Tensor
    """What `block` lies in."""
    arrived: set[str] = field(default_factory=set)

    def fill_gaps(self, chunk: Chunk) -> None:
        """Zeros for the gradients that did not come."""
        for slot in chunk.slots:
            if slot.name not in self.arrived:
                self.block[slot.offset : slot.offset + slot.numel].zero_()


@dataclass
class KeptGradients:
    """A whole chunk's gradients that this rank has not shared yet."""

    memory: torch.Tensor
    arrived: set[str] = field(default_factory=set)
    ready: Ticket | None = None


def as_block(chunk: Chunk, gradient: torch.Tensor) -> torch.Tensor | None:
    """A gradient that is all of its chunk's, as the block that it would be copied into; None where it is not like that.

    Nobody else holds it: what `AccumulateGrad` does not own alone, it copies.
    """
    if len(chunk.slots) > 1 or gradient.layout != torch.strided or gradient.dtype != chunk.dtype:
        return None
    if not gradient.is_contiguous():
        return None
    block = gradient.detach().view(-1)
    # Else its weights lie in another order.
    return block if chunk.slots[0].part_of(block).stride() == gradient.stride() else None


class Leaving(NamedTuple):
    """Memory that lanes are reading: kept until compute may write there again."""

    memory: torch.Tensor
    ticket: Ticket
    beside: tuple[torch.Tensor, ...]
    """Temporary tensors of the reduction. If they were let go now, compute would get their memory while it is read."""
