"""The blocks on the device in which gradients arrive, and memory that lanes still read."""

from __future__ import annotations

import itertools
from collections import deque

import torch

from elixir.chunk.arena import Arena
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients.chunk_gradient import OpenChunk
from elixir.chunk.memory import Memory


class GradientBlocks:
    """The gradient blocks of one rank.

    Args:
        arena: makes them.
        count: how many the plan has.
        block_bytes: size of one.
    """

    def __init__(self, arena: Arena, count: int, block_bytes: int) -> None:
        self._arena, self.block_bytes = arena, block_bytes
        self._free = deque(self._made(block_bytes) for _ in range(count))
        self._parts: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        """Views of a block as `OpenChunk.parts`, by its `id` and the index of the chunk: each is made once."""
        self._leaving: deque[OpenChunk] = deque()
        self._numbers = itertools.count()
        self.extra = 0
        """Blocks beyond the plan's, made because a chunk that others wait for never got its gradients."""

    @property
    def are_taken(self) -> bool:
        """Whether gradients are arriving in all blocks, so that none will be free."""
        return not self._free and not self._leaving

    def open(self, chunk: Chunk) -> OpenChunk:
        """Opens a block for a chunk, or separate memory if the chunk is resident and larger than any block."""
        parts: dict[str, torch.Tensor] = {}
        if chunk.weight_bytes > self.block_bytes:
            self._let_outsized_leave()
            memory = self._made(chunk.weight_bytes)
        else:
            memory = self._free_block()
            parts = self._parts.setdefault((id(memory), chunk.index), parts)
        return OpenChunk(memory.view(chunk.plan.numel, chunk.dtype), memory, next(self._numbers), parts)

    def adopt(self, chunk: Chunk, gradient: torch.Tensor, *, counted: bool) -> OpenChunk | None:
        """Takes a gradient that is larger than any block as autograd made it; None if it must be copied.

        Args:
            chunk: all of which it is the gradient of.
            gradient: as autograd made it.
            counted: whether the next one may be made before it has left. Otherwise it is the one in flight, which the
                plan counts with autograd's.
        """
        block = None if chunk.weight_bytes <= self.block_bytes else as_block(chunk, gradient)
        if block is None:
            return None
        self._let_outsized_leave()
        memory = Memory(block, self._arena.count if counted else None, "device", "gradient_blocks")
        return OpenChunk(block, memory, next(self._numbers))

    def leave(self, leaving: OpenChunk) -> None:
        """Keeps memory that lanes are reading from here on, until compute may write there again."""
        leaving.is_extra |= leaving.memory.tensor.nbytes != self.block_bytes
        self._leaving.append(leaving)

    def wait_for_last(self) -> None:
        """Lets compute wait for the memory that left last, which was adopted and not counted."""
        leaving = self._leaving.pop()
        leaving.memory.wait(taking=True)  # autograd frees the gradient next, and compute would write there
        _record(leaving.memory.tensor)

    def give_back(self, memory: Memory) -> None:
        """Frees `memory`, which nobody reads or writes any more."""
        if memory.tensor.nbytes == self.block_bytes:
            self._free.append(memory)
        else:
            _record(memory.tensor)
            memory.free()

    def reclaim_extra(self) -> None:
        """Gives compute all memory beyond the blocks, once it has left. Blocks go on leaving until one is needed."""
        while any(leaving.is_extra for leaving in self._leaving):
            self._reclaim()

    def reclaim_all(self) -> None:
        """Lets compute have all memory."""
        while self._leaving:
            self._reclaim()

    def _made(self, nbytes: int) -> Memory:
        return self._arena.make(nbytes, torch.uint8, "device", "gradient_blocks")

    def _let_outsized_leave(self) -> None:
        """The plan has room for one gradient that is larger than a block, next to the one in flight."""
        while any(leaving.memory.tensor.nbytes > self.block_bytes for leaving in self._leaving):
            self._reclaim()

    def _free_block(self) -> Memory:
        while not self._free and self._leaving:
            self._reclaim()
        if not self._free:
            self.extra += 1
            self._free.append(self._made(self.block_bytes))
        return self._free.popleft()

    def _reclaim(self) -> None:
        """Lets compute have the memory that has been leaving longest."""
        leaving = self._leaving.popleft()
        leaving.memory.wait(taking=True)  # compute would overwrite gradients in `memory` that lanes still read
        self.give_back(leaving.memory)


def _record(memory: torch.Tensor) -> None:
    """Keeps adopted memory from reuse, once it is freed, until the stream that has waited for its lane has come here.

    It returns to the stream that made it. That is another one where a node of an older graph took the gradient on its
    stream; on the same one this does nothing.
    """
    if memory.is_cuda:
        memory.record_stream(torch.cuda.current_stream(memory.device))


def as_block(chunk: Chunk, gradient: torch.Tensor) -> torch.Tensor | None:
    """Returns a gradient that is all of its chunk's, as the block that it would be copied into; None for any other.

    Nobody else holds it: `AccumulateGrad` copies a gradient that has another owner.
    """
    if len(chunk.slots) > 1 or gradient.layout != torch.strided or gradient.dtype != chunk.dtype:
        return None
    slot = chunk.slots[0]
    # Otherwise its weights lie in another order.
    return slot.flattened(gradient.detach()) if gradient.stride() == slot.stride else None
