"""Gradients on their way from autograd to the home of the optimizer states.

A gradient is copied into its chunk's gradient block as it arrives. When all of the chunk's are there, the block is
reduced over the ranks and its shard leaves for its home, beside the rest of backward; then the block is free again.
Weights are never touched. A chunk that misses gradients is sent off at the end of backward, zeros in their place.

Several ranks send their chunks in one order that all share, whatever their data does: the plan says behind which of
its gathers a chunk's reduction comes. A chunk that is complete waits for its place. One that is not when its place
comes is sent as it is, zeros for what is missing. Gradients that arrive later still, which takes another order of
execution than the traced one, are kept and sent with the next backward or before the optimizer steps.

While `reducing` is off, several ranks each add up whole gradients at the home of the states; they are added to the next
ones that are reduced, or reduced before the optimizer steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from elixir.chunk.buffers import Arena
from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.gradient_memory import GradShard, KeptGradients, Leaving, OpenChunk, Passage, as_block
from elixir.chunk.group import Group
from elixir.chunk.lanes import Lanes, Ticket


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
        overlap: gradients larger than a block leave beside the rest of backward; else it waits for them.
        places: per chunk, the position of the order that it is sent behind; chunks that are not in it come last.
        complete: called, in backward, with a chunk that has all its gradients, and the ticket of their arrival at home.
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
        overlap: bool = True,
        places: Mapping[int, int] | None = None,
        complete: Callable[[Chunk, Ticket], None] | None = None,
    ) -> None:
        self._lanes = lanes
        self._complete = complete
        self._group = group
        self._reduce_fp32 = reduce_fp32
        self._block_bytes = block_bytes
        self._overlap = overlap
        self._free = deque(
            arena.make(block_bytes, torch.uint8, "device", "gradient_blocks") for _ in range(block_count)
        )
        self._leaving: deque[Leaving] = deque()
        self._open: dict[int, OpenChunk] = {}
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._places = dict(places or {})
        self._position = -1  # of the order; its loads have been sent
        self._unsent: list[int] = []  # with several ranks: chunks still to be sent in this backward, in order
        self._unsettled = False  # a backward is over, and late gradients have not been asked for
        self._kept: dict[int, KeptGradients] = {}
        self.reducing = True
        """Off, several ranks keep their gradients to themselves; all must switch alike."""
        self.extra_blocks = 0
        """Blocks beyond the plan's, made because a chunk that others wait for never got its gradients."""
        self._arena = arena
        self._lock = threading.RLock()
        self.shards = {chunk.index: GradShard(torch.empty(0, dtype=chunk.dtype)) for chunk in chunks}
        for chunk in chunks:
            if chunk.plan.state_home == "host":
                self._make_shard(chunk)
        from_device = [chunk.shard_numel * chunk.dtype.itemsize for chunk in chunks if chunk.plan.state_home == "host"]
        self._passage = Passage(arena, lanes, max(from_device, default=0))
        self.offloaded_bytes = 0
        self.network_bytes = 0

    def take(self, chunk: Chunk, slot: Slot, gradient: torch.Tensor) -> None:
        """A gradient of one parameter has arrived; the caller lets go of `gradient`, which nobody else holds."""
        with self._lock:
            chunk.refuse_stepping(f"another gradient of {slot.name} comes")
            opened = self._open.get(chunk.index)
            if opened is None and (opened := self._adopted(chunk, gradient)) is not None:
                self._open[chunk.index] = opened
                opened.arrived.add(slot.name)
                self._send(chunk)
                if not self._overlap:
                    self._leaving.pop().ticket.wait()
                return
            if opened is None:
                opened = self._open[chunk.index] = self._opened(chunk)
            part = slot.part_of(opened.block)
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
        """The backward part of the order begins."""
        with self._lock:
            self._position = -1
            self._unsent = list(self._chunks) if self._group.size > 1 else []

    def leave(self, position: int) -> None:
        """The loads of `position` come next: send what has its place before them, complete or not."""
        with self._lock:
            while self._unsent and self._places.get(self._unsent[0], position) < position:
                self._send(self._chunks[self._unsent.pop(0)])

    def enter(self, position: int) -> None:
        """The loads of `position` have been sent."""
        with self._lock:
            self._position = position
            self._send_in_order()

    def flush(self) -> None:
        """Backward is over: send what is left, on every rank alike."""
        with self._lock:
            if self._group.size > 1:
                self._unsettled = True
            else:
                self._unsent = list(self._open)
            while self._unsent:
                self._send(self._chunks[self._unsent.pop(0)])

    def settle(self) -> None:
        """Block until every gradient is at its home; with several ranks, all must call it."""
        if self._unsettled and self.reducing:
            self._unsettled = False
            self._send_late()
        self._wait()

    def holds(self, chunk: Chunk, name: str) -> bool:
        """Whether this rank got a gradient of a parameter since they were last cleared."""
        known = (self.shards.get(chunk.index), self._open.get(chunk.index), self._kept.get(chunk.index))
        return any(part is not None and name in part.arrived for part in known)

    def any_held(self) -> bool:
        """Whether this rank got any gradient since they were last cleared."""
        return bool(self._open or self._kept) or any(shard.arrived for shard in self.shards.values())

    def clear(self, *, to_none: bool = True) -> None:
        """Forget all gradients, those that are on their way too; or have zeros in their place."""
        with self._lock:
            self._wait()
            arrived = {index: set(shard.arrived) for index, shard in self.shards.items()}
            for index, opened in self._open.items():
                arrived[index] |= opened.arrived
                self._give_back(opened.memory)
            for index in list(self._kept):
                arrived[index] |= self._drop_kept(self._chunks[index]).arrived
            self._open.clear()
            self._unsent = []
            self._unsettled = False
            for index, shard in self.shards.items():
                shard.dropped.clear()
                shard.holds = not to_none and bool(arrived[index])
                shard.arrived = arrived[index] if shard.holds else set()
                if shard.holds:
                    self._zero(self._chunks[index])
                else:
                    self._free_shard(self._chunks[index])

    def drop(self, chunk: Chunk, name: str) -> None:
        """Forget the gradient of one parameter, as ``parameter.grad = None`` does; all ranks must do the same.

        Nothing is waited for: its part of the shard is made zero before the next gradient is added there, and nobody
        reads it until then.
        """
        with self._lock:
            chunk.refuse_stepping(f"the gradient of {name} is dropped")
            opened, kept, shard = self._open.get(chunk.index), self._kept.get(chunk.index), self.shards.get(chunk.index)
            if opened is not None and name in opened.arrived:
                opened.arrived.remove(name)
                if not opened.arrived:
                    self._give_back(self._open.pop(chunk.index).memory)
            if kept is not None and name in kept.arrived:
                kept.arrived.remove(name)
                if kept.arrived:
                    part = next(slot for slot in chunk.slots if slot.name == name).part_of(kept.memory)
                    kept.ready = self._lanes.offload.submit(part.zero_, after=kept.tickets)
                else:
                    self._drop_kept(chunk)
            if shard is None or not shard.holds:
                return
            shard.arrived.discard(name)
            shard.dropped.add(name)  # where other ranks got a gradient of it this one holds a part of that
            alone = self._group.size == 1 and not shard.arrived
            if alone or all(slot.name in shard.dropped for slot in chunk.slots):
                shard.holds = False
                shard.arrived.clear()
                shard.dropped.clear()
                if shard.ready is not None and chunk.plan.state_home == "device":
                    shard.ready.synchronize()  # it must not arrive in memory that is gone
                self._free_shard(chunk)

    def _free_shard(self, chunk: Chunk) -> None:
        """The memory of gradients on the device is there only while they are."""
        shard = self.shards[chunk.index]
        if shard.memory.numel() and chunk.plan.state_home == "device":
            self._arena.count(-shard.memory.nbytes, "device", "gradients")
            shard.memory = torch.empty(0, dtype=shard.memory.dtype)

    def _zero(self, chunk: Chunk) -> None:
        shard = self.shards[chunk.index]
        if not shard.memory.numel():
            self._make_shard(chunk)  # of zeros
            return
        if chunk.updated is not None:
            chunk.updated.synchronize()  # the step before may still read it
        shard.memory.zero_()

    def _wait(self) -> None:
        for shard in self.shards.values():
            if shard.ready is not None:
                shard.ready.synchronize()
        with self._lock:
            while self._leaving:
                self._reclaim()

    def _make_shard(self, chunk: Chunk) -> None:
        self.shards[chunk.index].memory = self._arena.make(
            chunk.shard_numel, chunk.dtype, chunk.plan.update_home, "gradients"
        )

    def _send_late(self) -> None:
        """Send what arrived after its chunk had been sent, on any rank.

        Raises:
            InputError: a chunk has been stepped without it, on any rank; then on all, and what came late is left out.
        """
        answers: list[tuple[list[int], list[int]]] = []
        mine = sorted({*self._open, *self._kept}), [index for index, chunk in self._chunks.items() if chunk.stepping]
        self._lanes.network.submit(lambda: answers.extend(self._group.exchange("late gradients", mine))).synchronize()
        late = [index for index in self._chunks if any(index in theirs for theirs, _ in answers)]
        missed = [index for index in late if any(index in theirs for _, theirs in answers)]
        with self._lock:
            for index in late:
                if index not in missed:
                    self._send(self._chunks[index], late=True)
                elif index in self._open:
                    self._give_back(self._open.pop(index).memory)
        if missed:
            raise self._chunks[missed[0]].stepped_without("on some rank gradients came")

    def _send_in_order(self) -> None:
        while self._unsent:
            chunk = self._chunks[self._unsent[0]]
            opened = self._open.get(chunk.index)
            if opened is None or len(opened.arrived) < len(chunk.slots):
                return
            if self._places.get(chunk.index, self._position + 1) > self._position:
                return  # gathers come first, on other ranks too
            self._unsent.pop(0)
            self._send(chunk)

    def _opened(self, chunk: Chunk) -> OpenChunk:
        if chunk.weight_bytes > self._block_bytes:
            # Resident, and larger than any block.
            self._let_outsized_leave()
            memory = self._arena.make(chunk.weight_bytes, torch.uint8, "device", "gradient_blocks")
        else:
            memory = self._free_block()
        return OpenChunk(memory[: chunk.weight_bytes].view(chunk.dtype), memory)

    def _adopted(self, chunk: Chunk, gradient: torch.Tensor) -> OpenChunk | None:
        """A gradient that leaves as autograd made it, since it is larger than any block."""
        # With several ranks a chunk is reduced in memory that is padded.
        block = None if chunk.weight_bytes <= self._block_bytes or self._group.size > 1 else as_block(chunk, gradient)
        if block is None:
            return None
        self._let_outsized_leave()
        if self._overlap:  # else it has gone before the next one is made: it is the one in flight, which is autograd's
            self._arena.count(block.nbytes, "device", "gradient_blocks")
        return OpenChunk(block, block)

    def _let_outsized_leave(self) -> None:
        """The plan has room for one gradient that is larger than a block, beside the one in flight."""
        while any(leaving.memory.nbytes > self._block_bytes for leaving in self._leaving):
            self._reclaim()

    def _free_block(self) -> torch.Tensor:
        while not self._free and self._leaving:
            self._reclaim()
        if not self._free:
            self.extra_blocks += 1
            self._free.append(self._arena.make(self._block_bytes, torch.uint8, "device", "gradient_blocks"))
        return self._free.popleft()

    def _reclaim(self) -> None:
        """Let compute have the memory that has been leaving longest."""
        memory, ticket, _ = self._leaving.popleft()
        ticket.wait()
        self._give_back(memory)

    def _give_back(self, memory: torch.Tensor) -> None:
        if memory.nbytes == self._block_bytes:
            self._free.append(memory)
        else:
            self._arena.count(-memory.nbytes, "device", "gradient_blocks")

    def _send(self, chunk: Chunk, *, late: bool = False) -> None:
        """Reduce a chunk's gradients and let this rank's shard leave for its home.

        Args:
            late: backward is over, so that its step no longer begins in there.
        """
        opened = self._open.pop(chunk.index, None)
        if self._group.size > 1 and not self.reducing:
            if opened is not None:
                self._keep(chunk, opened)
            return
        if opened is None:
            opened = self._opened(chunk)
        opened.fill_gaps(chunk)
        shard = self.shards[chunk.index]
        if not shard.memory.numel():
            self._make_shard(chunk)
        shard.arrived |= opened.arrived
        whole = opened.block
        # The step before may still read the shard that is written below.
        readers = [] if chunk.updated is None else [chunk.updated]
        reductions: list[Ticket] = []
        mine = whole[chunk.shard_start : chunk.shard_start + chunk.shard_numel]
        beside: tuple[torch.Tensor, ...] = ()
        complete: list[Ticket] = []
        if chunk.index in self._kept:
            kept = self._drop_kept(chunk)
            shard.arrived |= kept.arrived
            memory = kept.memory
            beside = (memory,)
            complete.append(
                self._lanes.offload.submit(
                    lambda: whole.add_(memory.to(whole.device)), after=kept.tickets, nbytes=memory.nbytes
                )
            )
        if self._group.size > 1:
            # In place where the dtype allows: the block has room for the result.
            reduced = torch.empty_like(mine, dtype=torch.float32) if self._reduce_fp32 else mine

            def reduce() -> None:
                wide = whole.float() if self._reduce_fp32 else whole  # now: what was kept has been added
                self._group.reduce_mean(reduced, wide, f"gradients of chunk {chunk.index}")

            self.network_bytes += whole.nbytes - mine.nbytes
            reductions.append(self._lanes.network.submit(reduce, after=complete, nbytes=whole.nbytes - mine.nbytes))
            mine, beside = reduced, (reduced, *beside)
        adds, shard.holds = shard.holds, True
        stale = self._parts_of(chunk, shard.dropped) if adds else []
        shard.dropped.clear()
        home = shard.memory[: mine.numel()]  # but for padding, all of it

        def add(gradients: torch.Tensor) -> None:
            for part in stale:
                part.zero_()
            home.add_(gradients)

        moved_bytes = shard.memory.nbytes if chunk.plan.state_home == "host" else 0
        self.offloaded_bytes += moved_bytes
        if adds:
            gone, shard.ready = self._passage.add(add, mine, home, written=reductions, used=readers, nbytes=moved_bytes)
        else:
            copy = partial(home.copy_, mine, non_blocking=True)
            gone = shard.ready = self._lanes.offload.submit(copy, after=[*readers, *reductions], nbytes=moved_bytes)
        self._leaving.append(Leaving(opened.memory, gone, beside))
        if self._complete is not None and self.reducing and not late and len(opened.arrived) == len(chunk.slots):
            self._complete(chunk, shard.ready)

    def _keep(self, chunk: Chunk, opened: OpenChunk) -> None:
        """Add a chunk's gradients to those that this rank has kept to itself."""
        opened.fill_gaps(chunk)
        home, kept = chunk.plan.update_home, self._kept.get(chunk.index)
        if kept is None:
            device = self._arena.device if home == "device" else torch.device("cpu")
            kept = self._kept[chunk.index] = KeptGradients(torch.zeros_like(opened.block, device=device))
            self._arena.count(kept.memory.nbytes, home, "gradients")
        kept.arrived |= opened.arrived
        memory, block = kept.memory, opened.block
        moved_bytes = block.nbytes if home == "host" else 0
        self.offloaded_bytes += moved_bytes
        gone, kept.ready = self._passage.add(memory.add_, block, memory, used=kept.tickets, nbytes=moved_bytes)
        self._leaving.append(Leaving(opened.memory, gone, (memory,)))

    def _parts_of(self, chunk: Chunk, names: Collection[str]) -> list[torch.Tensor]:
        """What this rank's shard has of some parameters."""
        memory, first = self.shards[chunk.index].memory, chunk.shard_start
        bounds = [(slot.offset - first, slot.offset - first + slot.numel) for slot in chunk.slots if slot.name in names]
        return [memory[max(begin, 0) : max(end, 0)] for begin, end in bounds]

    def _drop_kept(self, chunk: Chunk) -> KeptGradients:
        kept = self._kept.pop(chunk.index)
        self._arena.count(-kept.memory.nbytes, chunk.plan.update_home, "gradients")
        return kept
