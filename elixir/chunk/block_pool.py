"""`BlockPool`: the blocks of the rCache, in one storage."""

from __future__ import annotations

import torch

from elixir.access.placeholders import marked, storage_of, unmarked
from elixir.chunk.arena import Arena
from elixir.errors import StateError


class BlockPool:
    """rCache: `count` blocks of one size in one storage, so that a tensor's storage tells whether it lies in a block.

    Args:
        arena: makes the memory.
        count: number of blocks.
        block_bytes: size of one.
        poison: fill what leaves a block with NaN, so that a stale use cannot go unnoticed; for tests.
    """

    def __init__(self, arena: Arena, count: int, block_bytes: int, *, poison: bool = False) -> None:
        self.block_bytes = block_bytes
        self.count = count
        self._poison = poison
        self._memory = arena.make(count * block_bytes, torch.uint8, "device", "rcache").tensor
        self._marked = marked(self._memory)
        self._free = list(range(count - 1, -1, -1))
        self.storage = self._memory.untyped_storage()._cdata if count else -1

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def take(self) -> int:
        """Takes a free block; returns its index."""
        if not self._free:
            raise StateError(f"all {self.count} rCache blocks are taken")
        return self._free.pop()

    def give_back(self, block: int) -> None:
        """Frees a block, whose contents nobody needs."""
        if self._poison:
            self._memory[block * self.block_bytes : (block + 1) * self.block_bytes].fill_(0xFF)  # NaN in every dtype
        self._free.append(block)

    def view(self, block: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of a block."""
        start = block * self.block_bytes
        return self._memory[start : start + numel * dtype.itemsize].view(dtype)

    def marked_view(self, block: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same elements, marked (`elixir.access.placeholders`)."""
        start = block * self.block_bytes
        with unmarked():
            return self._marked[start : start + numel * dtype.itemsize].view(dtype)

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(block, offset in elements inside it) of a tensor that lies in the pool, else None."""
        if storage_of(tensor) != self.storage:
            return None
        block, offset = divmod(int(tensor.storage_offset()) * tensor.itemsize, self.block_bytes)
        return block, offset // tensor.itemsize
