"""The weights of one chunk as a whole, outside of a step: gathered from all ranks, or from where one rank has them."""

from __future__ import annotations

import logging

import torch

from elixir.chunk.chunk import Chunk
from elixir.errors import DiskError, ElixirError, NoMemoryError
from elixir.wrapper.engine import Engine

logger = logging.getLogger(__name__)


def whole(engine: Engine, chunk: Chunk, precise: bool = False, copy: bool = True) -> torch.Tensor:
    """The gathered weights of a chunk on the device; with `precise`, its masters if it has any. See `gathered`."""
    if chunk.shown is not None:
        return chunk.shown
    found = precisely(engine, chunk, copy)[0] if precise else gathered(engine, chunk, copy=copy)
    return chunk.with_moved(found) if engine.is_ordinary(chunk) else found


def precisely(engine: Engine, chunk: Chunk, copy: bool = True) -> tuple[torch.Tensor, ElixirError | None]:
    """The gathered weights of a chunk in the precision of its masters. If this rank's disk cannot read them, the
    weights in memory and the error."""
    if not has_wide_masters(chunk):
        return gathered(engine, chunk, copy=copy), None
    found: torch.Tensor | None = None
    try:
        with chunk.in_memory():
            chunk.follow_writes()
            found = gathered(engine, chunk, chunk.masters, copy)
    except (DiskError, NoMemoryError) as error:
        if found is None:  # otherwise all ranks have gathered, and only the write back has failed
            logger.error("weights are given as they are in memory, in %s: %s", chunk.plan.dtype, error)
            return gathered(engine, chunk, chunk.shard_weights.to(torch.float32)), error
    return found, None


def has_wide_masters(chunk: Chunk) -> bool:
    """Whether the masters of a chunk have more bits than its weights."""
    return chunk.masters is not None and chunk.masters.dtype != chunk.dtype


def gathered(engine: Engine, chunk: Chunk, shard: torch.Tensor | None = None, copy: bool = True) -> torch.Tensor:
    """The gathered weights of a chunk on the device, or the gathered `shard` of all ranks. Without `copy` a rank that
    has all of them in memory gives what it has, on the host too: to be read, before the next step."""
    if shard is None:
        if chunk.weights is not None:
            return chunk.weights
        shard = chunk.shard_weights
    if not copy and chunk.on_one_rank and chunk.stored is None:
        return shard
    together = torch.empty(chunk.plan.numel, dtype=shard.dtype, device=engine.device)
    mine = shard.to(engine.device)
    # This thread reads it next, which the network writes.
    engine.lanes.network.submit(lambda: engine.group.gather(together, mine)).synchronize()
    return together
