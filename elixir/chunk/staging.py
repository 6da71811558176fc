"""Host memory through which updated weights of low precision return to the device: two buffers that take turns.

The host's Adam rounds new weights into one, in the pass in which it steps their masters, while those of the chunk before are
on their way to the device from the other. Copied from the masters instead they would be rounded on the way, on CUDA by the
thread that issues the copy and in memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elixir.chunk.buffers import Arena
from elixir.chunk.chunk import Chunk
from elixir.chunk.lanes import Ticket
from elixir.plan import STAGING_BUFFERS


@dataclass
class Stage:
    """One of the buffers."""

    memory: torch.Tensor
    left: Ticket | None = None
    """Of what was in it last, on its way to the device."""

    def view(self, chunk: Chunk) -> torch.Tensor:
        """As much of it as this rank's shard of a chunk fills."""
        return self.memory[: chunk.shard_numel * chunk.dtype.itemsize].view(chunk.dtype)


class Staging:
    """The buffers of one rank.

    Args:
        chunks: all chunks of the plan.
        arena: makes the memory, pinned beside a CUDA device.
    """

    def __init__(self, chunks: Sequence[Chunk], arena: Arena) -> None:
        sizes = [chunk.shard_numel * chunk.dtype.itemsize for chunk in chunks if chunk.plan.returns_rounded]
        count = min(len(sizes), STAGING_BUFFERS)
        self._stages = [Stage(arena.make(max(sizes), torch.uint8, "host", "staging")) for _ in range(count)]
        self._next = 0

    def take(self) -> Stage:
        """The buffer whose turn it is; wait for `Stage.left` before writing to it, and say there when it is free again."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % len(self._stages)
        return stage
