"""rCache: streamed chunks come into blocks before they are used and leave when others are needed more.

The cache walks the plan's order as the step reports its uses. At every position it brings in the window that
`elixir.schedule` says, evicting whom it says, so the loads are those the plan predicted. A use that the order does not
foresee is fetched on demand and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from elixir.chunk.buffers import BlockPool
from elixir.chunk.chunk import Chunk, ChunkState
from elixir.chunk.group import Group
from elixir.chunk.lanes import Lanes
from elixir.errors import StateError
from elixir.schedule import StepSchedule

logger = logging.getLogger(__name__)

_LOOKAHEAD = 64
"""How far a use is searched in the order before it counts as a deviation."""


@dataclass
class CacheCounts:
    """What the cache did since `begin` of a step."""

    loads: int = 0
    hits: int = 0
    """Requirements of the order that were met by what was there: neither loaded for it, nor fetched ahead for it."""
    demand_loads: int = 0
    """Loads that nothing had foreseen: the use had to wait for all of the transfer."""
    deviations: int = 0
    host_to_device_bytes: int = 0
    network_bytes: int = 0


class RCache:
    """The blocks, and which chunk is in which.

    Args:
        chunks: all chunks of the plan, by index.
        schedule: the plan's order without the resident chunks.
        pool: the blocks.
        lanes: fetch and network are used.
        group: over which chunks are sharded.
        evict_always: evict whatever is not pinned after every use; for tests.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        schedule: StepSchedule,
        pool: BlockPool,
        lanes: Lanes,
        group: Group,
        *,
        evict_always: bool = False,
    ) -> None:
        self._chunks = chunks
        self._schedule = schedule
        self._pool = pool
        self._lanes = lanes
        self._group = group
        self._evict_always = evict_always
        self._known = frozenset(chunk for chunks in schedule.policy.required for chunk in chunks)
        self._in_block: dict[int, int] = {}  # block -> chunk
        self._lock = threading.RLock()  # forward and the engine's threads take turns, and reports may come any time
        self.counts = CacheCounts()
        self.begin()

    def begin(self) -> None:
        """A forward starts: the order is walked from its beginning, with whatever is in the blocks."""
        with self._lock:
            self._position = -1
            self._fresh: set[int] = set()  # loaded, and not required since
            self._view = self._schedule.policy.start()
            for index in self._in_block.values():
                if index in self._known:
                    self._view.admit(index)

    def take_counts(self) -> CacheCounts:
        """Counts since they were last taken."""
        counts, self.counts = self.counts, CacheCounts()
        return counts

    def acquire(self, indices: Sequence[int]) -> None:
        """Compute may read these chunks from here on. Each gets one pin; give it back with `unpin`."""
        with self._lock:
            self._advance(indices)
            for index in indices:
                # Pinned one by one before the next is fetched: no fetch may evict another of the same use.
                self._chunks[index].pins += 1
            for index in indices:
                self._ready(self._chunks[index])

    def unpin(self, indices: Iterable[int]) -> None:
        """Give back one pin of each."""
        with self._lock:
            for index in indices:
                self._chunks[index].pins -= 1
            if self._evict_always:
                for chunk in [self._chunks[index] for index in self._in_block.values()]:
                    if not chunk.pins:
                        self._evict(chunk)

    def chunk_at(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(chunk, offset in elements inside it) of a tensor that lies in a block, else None."""
        found = self._pool.find(tensor)
        if found is None:
            return None
        block, offset = found
        return self._in_block[block], offset

    def memory(self, index: int) -> torch.Tensor:
        """The block of a cached chunk, as a flat tensor of its elements."""
        chunk = self._chunks[index]
        if chunk.block is None:
            raise StateError(f"chunk {index} is {chunk.state.value}, it has no block")
        return self._pool.view(chunk.block, chunk.plan.numel, chunk.dtype)

    def invalidate(self) -> None:
        """The weights have changed at home: nothing in the blocks is valid any more."""
        with self._lock:
            for index in list(self._in_block.values()):
                self._evict(self._chunks[index])
            self.begin()

    def _advance(self, used: Sequence[int]) -> None:
        """Walk the order up to the entry that uses `used`, loading each window on the way."""
        required = self._schedule.policy.required
        wanted = set(used)
        if self._position >= 0 and wanted <= set(required[self._position]):
            return
        for position in range(self._position + 1, min(self._position + 1 + _LOOKAHEAD, len(required))):
            if wanted <= set(required[position]):
                for passed in range(self._position + 1, position + 1):
                    if self._position >= 0:
                        self._view.passed(self._position)
                    self._position = passed
                    self._load_window(self._schedule.windows[passed])
                    for index in required[passed]:
                        if index in self._fresh:
                            self._fresh.remove(index)
                        else:
                            self.counts.hits += 1
                return
        self.counts.deviations += 1

    def _load_window(self, window: Sequence[int]) -> None:
        for index in window:
            chunk = self._chunks[index]
            if chunk.state is ChunkState.HOME and self._make_room(optional=True):
                self._load(chunk)

    def _ready(self, chunk: Chunk) -> None:
        if chunk.state is ChunkState.HOME:
            self.counts.demand_loads += 1
            self._make_room(optional=False)
            self._load(chunk)
        if chunk.state is ChunkState.FETCHING:
            if chunk.filled is not None:
                chunk.filled.wait()
            chunk.to(ChunkState.CACHED, self.memory(chunk.index))

    def _make_room(self, *, optional: bool) -> bool:
        """See that a block is free; whether one is."""
        if self._pool.free:
            return True
        residents = list(self._in_block.values())
        strangers = [index for index in residents if index not in self._known and not self._chunks[index].pins]
        victim = strangers[0] if strangers else self._view.victim(i for i in residents if self._chunks[i].pins)
        if victim is not None:
            self._evict(self._chunks[victim])
            return True
        if optional:
            return False
        raise StateError(
            f"all {self._pool.count} rCache blocks are in use at once; this step uses more chunks together than the "
            "traced one: plan again with this step, or with more device memory"
        )

    def _evict(self, chunk: Chunk) -> None:
        if chunk.filled is not None and chunk.state is ChunkState.FETCHING:
            chunk.filled.synchronize()  # its transfer must not arrive in a block that has another owner
        chunk.to(ChunkState.HOME)
        if chunk.block is None:
            raise StateError(f"chunk {chunk.index} leaves a block that it does not have")
        del self._in_block[chunk.block]
        if chunk.index in self._view.residents:
            self._view.evict(chunk.index)
        self._fresh.discard(chunk.index)
        self._pool.give_back(chunk.block)
        chunk.block = chunk.filled = None

    def _load(self, chunk: Chunk) -> None:
        """Start filling a free block beside compute."""
        chunk.block = self._pool.take()
        self._in_block[chunk.block] = chunk.index
        if chunk.index in self._known:
            self._view.admit(chunk.index)
        chunk.to(ChunkState.FETCHING)
        whole, shard = self.memory(chunk.index), chunk.shard
        if shard is None:
            raise StateError(f"chunk {chunk.index} has no shard to fetch from")
        self.counts.loads += 1
        self._fresh.add(chunk.index)
        after = [] if chunk.updated is None else [chunk.updated]
        if self._group.size == 1:
            chunk.filled = self._lanes.fetch.submit(
                lambda: whole.copy_(shard, non_blocking=True),
                after=after,
                nbytes=shard.nbytes,
            )
            self.counts.host_to_device_bytes += shard.nbytes
            return
        part = whole[chunk.shard_start : chunk.shard_start + chunk.shard_numel]
        if chunk.plan.weight_home == "host":
            after = [
                self._lanes.fetch.submit(
                    lambda: part.copy_(shard, non_blocking=True),
                    after=after,
                    nbytes=shard.nbytes,
                )
            ]
            self.counts.host_to_device_bytes += shard.nbytes
            source = part
        else:
            source = shard
        self.counts.network_bytes += whole.nbytes - shard.nbytes
        chunk.filled = self._lanes.network.submit(
            lambda: self._group.gather(whole, source), after=after, nbytes=whole.nbytes - shard.nbytes
        )
