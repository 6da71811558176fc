"""Gradients on their way from autograd to the home of the optimizer states.

A gradient is copied into its chunk's gradient block as it arrives. When all of the chunk's are there, the block is
reduced over the ranks and its shard leaves for its home, beside the rest of backward; then the block is free again.
Weights are never touched. A chunk that misses gradients is sent off at the end of backward, zeros in their place.

Several ranks send their chunks in one order that all share, whatever their data does: a chunk that is complete waits
for those before it, and at the end of backward every rank sends all that is left, with or without gradients.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from elixir.chunk.buffers import Arena
from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.group import Group
from elixir.chunk.lanes import Lanes, Ticket
from elixir.errors import StateError


@dataclass
class GradShard:
    """This rank's part of one chunk's gradient, where the optimizer states live."""

    memory: torch.Tensor
    holds: bool = False
    """Whether it holds a gradient, so that the next one is added."""
    ready: Ticket | None = None
    arrived: set[str] = field(default_factory=set)
    """Names of the parameters that got a gradient on this rank since the last step."""


@dataclass
class _Open:
    """A chunk whose gradients are arriving."""

    block: torch.Tensor
    arrived: set[str] = field(default_factory=set)


class GradientFlow:
    """Takes gradients from autograd to their homes.

    Args:
        chunks: trainable chunks whose gradients are gathered in blocks, in the order in which ranks send them.
        arena: makes the memory.
        lanes: network and offload are used.
        group: over which gradients are averaged.
        block_count: how many gradient blocks there are.
        block_bytes: size of one.
        reduce_fp32: sum over the ranks in float32.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        arena: Arena,
        lanes: Lanes,
        group: Group,
        *,
        block_count: int,
        block_bytes: int,
        reduce_fp32: bool = False,
    ) -> None:
        self._lanes = lanes
        self._group = group
        self._reduce_fp32 = reduce_fp32
        self._block_bytes = block_bytes
        # An outsized gradient is larger than a block; it goes straight from autograd's tensor.
        self._free = deque(
            arena.make(block_bytes, torch.uint8, "device", "gradient_blocks") for _ in range(block_count)
        )
        self._leaving: deque[tuple[torch.Tensor, Ticket]] = deque()
        self._open: dict[int, _Open] = {}
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._unsent: list[int] = []  # with several ranks: chunks still to be sent in this backward, in order
        self.extra_blocks = 0
        """Blocks beyond the plan's, made because a chunk that others wait for never got its gradients."""
        self._arena = arena
        self._lock = threading.RLock()
        self.shards = {
            chunk.index: GradShard(arena.make(chunk.shard_numel, chunk.dtype, chunk.plan.state_home, "gradients"))
            for chunk in chunks
        }
        self.offloaded_bytes = 0
        self.network_bytes = 0
        self.reduce = True
        """False while micro-batches are accumulated without a reduction."""

    def take(self, chunk: Chunk, slot: Slot, gradient: torch.Tensor) -> None:
        """A gradient of one parameter has arrived; `gradient` may be let go afterwards."""
        with self._lock:
            opened = self._open.get(chunk.index)
            if opened is None:
                opened = self._open[chunk.index] = _Open(self._block_for(chunk))
            part = opened.block[slot.offset : slot.offset + slot.numel].view(slot.shape)
            if slot.name in opened.arrived:
                part.add_(gradient)  # another part of the graph used it too
            else:
                part.copy_(gradient)
                opened.arrived.add(slot.name)
            if len(opened.arrived) == len(chunk.slots):
                if self._group.size == 1:
                    self._send(chunk)
                else:
                    self._send_in_order()

    def begin(self) -> None:
        """A backward starts."""
        with self._lock:
            self._unsent = list(self._chunks) if self._group.size > 1 else []

    def flush(self) -> None:
        """Backward is over: send what is left, on every rank alike."""
        with self._lock:
            for index in self._unsent or list(self._open):
                self._send(self._chunks[index])
            self._unsent = []

    def settle(self) -> None:
        """Block until every gradient is at its home."""
        for shard in self.shards.values():
            if shard.ready is not None:
                shard.ready.synchronize()

    def clear(self) -> None:
        """Forget all gradients, those that are on their way too."""
        with self._lock:
            self.settle()
            for opened in self._open.values():
                self._free.append(opened.block.view(torch.uint8))
            self._open.clear()
            for shard in self.shards.values():
                shard.holds = False
                shard.arrived.clear()

    def _send_in_order(self) -> None:
        while self._unsent:
            chunk = self._chunks[self._unsent[0]]
            opened = self._open.get(chunk.index)
            if opened is None or len(opened.arrived) < len(chunk.slots):
                return
            self._unsent.pop(0)
            self._send(chunk)

    def _block_for(self, chunk: Chunk) -> torch.Tensor:
        if not self._free and self._leaving:
            block, ticket = self._leaving.popleft()
            ticket.wait()
            self._free.append(block)
        if not self._free:
            self.extra_blocks += 1
            self._free.append(self._arena.make(self._block_bytes, torch.uint8, "device", "gradient_blocks"))
        block = self._free.popleft()
        if chunk.weight_bytes > self._block_bytes:
            raise StateError(
                f"chunk {chunk.index} has {chunk.weight_bytes} gradient bytes, a block {self._block_bytes}"
            )
        return block[: chunk.weight_bytes].view(chunk.dtype)

    def _send(self, chunk: Chunk) -> None:
        """Reduce a chunk's gradients and let this rank's shard leave for its home."""
        opened = self._open.pop(chunk.index, None)
        if opened is None:
            opened = _Open(self._block_for(chunk))
        for slot in chunk.slots:
            if slot.name not in opened.arrived:
                opened.block[slot.offset : slot.offset + slot.numel].zero_()
        shard = self.shards[chunk.index]
        shard.arrived |= opened.arrived
        whole = opened.block
        # The step before may still read the shard that is written below.
        after: list[Ticket] = [] if chunk.updated is None else [chunk.updated]
        mine = whole[chunk.shard_start : chunk.shard_start + chunk.shard_numel]
        if self._group.size > 1:
            reduced = torch.empty_like(mine, dtype=torch.float32 if self._reduce_fp32 else mine.dtype)
            wide = whole.float() if self._reduce_fp32 else whole

            def reduce() -> None:
                self._group.reduce_mean(reduced, wide)

            self.network_bytes += whole.nbytes - mine.nbytes
            after.append(self._lanes.network.submit(reduce, nbytes=whole.nbytes - mine.nbytes))
            mine = reduced
        adds, shard.holds = shard.holds, True

        def deliver() -> None:
            if adds:
                shard.memory.add_(mine.to(shard.memory.device))
            else:
                shard.memory.copy_(mine, non_blocking=True)

        shard.ready = self._lanes.offload.submit(deliver, after=after, nbytes=shard.memory.nbytes)
        if chunk.plan.state_home == "host":
            self.offloaded_bytes += shard.memory.nbytes
        storage = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(whole.untyped_storage())
        self._leaving.append((storage, shard.ready))
