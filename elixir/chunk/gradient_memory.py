"""What holds a chunk's gradients: while they arrive, while they leave, and at the home of the optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from elixir.chunk.buffers import Arena
from elixir.chunk.chunk import Chunk
from elixir.chunk.lanes import Lanes, Ticket


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

    @property
    def tickets(self) -> list[Ticket]:
        """Of what comes before anything else may be done with them."""
        return [] if self.ready is None else [self.ready]


class Passage:
    """Where gradients go that are added to those of earlier batches.

    What comes from a CUDA device to the host passes through a pinned buffer, and a thread of the host adds it up: whoever
    submits compute is not kept. All that passes takes turns, as copying and adding do in the plan's time.

    Args:
        arena: makes the buffer, at the first use.
        lanes: offload and the host's Adam, which has nothing to do while gradients are added.
        least_bytes: of the buffer.
    """

    def __init__(self, arena: Arena, lanes: Lanes, least_bytes: int) -> None:
        self._arena, self._lanes, self._least_bytes = arena, lanes, least_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._added: Ticket | None = None  # of what passed last

    def add(
        self,
        add: Callable[[torch.Tensor], object],
        gradients: torch.Tensor,
        home: torch.Tensor,
        *,
        written: Sequence[Ticket] = (),
        used: Sequence[Ticket] = (),
        nbytes: int,
    ) -> tuple[Ticket, Ticket]:
        """Add `gradients` to what is in `home`.

        Args:
            add: does it, with the gradients where `home` is.
            gradients: on the device.
            home: on the device or the host.
            written: tickets of what writes `gradients`.
            used: tickets of what still uses `home`.
            nbytes: moved between device and host.

        Returns:
            Tickets of the last read of `gradients`, and of the sum.
        """
        if gradients.device == home.device:
            done = self._lanes.offload.submit(partial(add, gradients), after=[*written, *used], nbytes=nbytes)
            return done, done
        here = self._room(gradients.nbytes)[: gradients.nbytes].view(gradients.dtype)
        before = [] if self._added is None else [self._added]
        copy = partial(here.copy_, gradients, non_blocking=True)
        gone = self._lanes.offload.submit(copy, after=[*written, *before], nbytes=nbytes)
        self._added = self._lanes.host_adam.submit(partial(add, here), after=[gone, *used])
        return gone, self._added

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._buffer.numel() < nbytes:
            if self._added is not None:
                self._added.synchronize()
            self._arena.count(-self._buffer.nbytes, "host", "gradients")
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before there is a new one
            self._buffer = self._arena.make(max(nbytes, self._least_bytes), torch.uint8, "host", "gradients")
        return self._buffer


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
