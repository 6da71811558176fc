"""The rCache's memory: every streamed chunk has a storage, into which a block's memory moves while weights are there.

Views refer to the storage, so they show the weights whenever these are there, however long the views live. An operator
that reads one while the storage is empty meets the mark (`elixir.access.placeholders`).
"""

from __future__ import annotations

import torch

from elixir.access.placeholders import marked
from elixir.chunk.arena import Arena
from elixir.errors import StateError
from elixir.torch_private import MEMORY_MOVES, move_memory


class Block:
    """The gathered weights of one streamed chunk, whose memory comes and goes.

    Args:
        numel: elements of the chunk.
        dtype: of the weights.
        memory: of a block, flat; the caller takes it back.
    """

    def __init__(self, numel: int, dtype: torch.dtype, memory: torch.Tensor) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=memory.device).untyped_storage()
        move_memory(memory.untyped_storage(), self.storage)
        self.flat = torch.empty(0, dtype=dtype, device=memory.device).set_(self.storage, 0, (numel,), (1,))
        """All elements, flat. Writes through it do not count as writes to the weights."""
        self.marked = marked(self.flat)
        """The same, marked: what parameters, and views of them, lie in."""

    @property
    def is_filled(self) -> bool:
        """Whether it has memory."""
        return bool(self.storage.nbytes())


class BlockPool:
    """The memory of `count` blocks of one size.

    Args:
        arena: makes it.
        count: number of blocks.
        block_bytes: size of one.
        poison: fill what leaves a block with NaN, so that a stale use cannot go unnoticed; for tests.
    """

    def __init__(self, arena: Arena, count: int, block_bytes: int, *, poison: bool = False) -> None:
        self.count, self.block_bytes, self._poison = count, block_bytes, poison
        passing = not MEMORY_MOVES
        made = [arena.make(block_bytes, torch.uint8, "device", "rcache", passing=passing) for _ in range(count)]
        self._free = [memory.tensor for memory in made]
        self._taken: list[torch.Tensor] = []  # whose memory is in chunks' storages, in any order

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def block(self, numel: int, dtype: torch.dtype) -> Block:
        """Makes an empty block for a chunk."""
        made = Block(numel, dtype, self._free[-1])
        move_memory(made.storage, self._free[-1].untyped_storage())
        return made

    def fill(self, block: Block) -> None:
        """Gives a block memory, whose contents are not defined."""
        if not self._free:
            raise StateError(f"all {self.count} rCache blocks are taken")
        self._taken.append(self._free.pop())
        move_memory(self._taken[-1].untyped_storage(), block.storage)

    def empty(self, block: Block) -> None:
        """Takes the memory, whose contents nobody needs."""
        if self._poison:
            block.flat.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        self._free.append(self._taken.pop())
        move_memory(block.storage, self._free[-1].untyped_storage())
