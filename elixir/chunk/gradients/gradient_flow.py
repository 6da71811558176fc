"""Gradients on their way from autograd to the home of the optimizer states.

A gradient is copied into its chunk's gradient block as it arrives. When all of the chunk's are there, the block is
reduced over the ranks and its shard leaves for its home while backward goes on; then the block is free again.
Weights are never touched. A chunk that misses gradients is sent off at the end of backward, zeros in their place.

Several ranks send their chunks in one order that all share, whatever their data does: the plan says after which of
its gathers a chunk's reduction comes. A chunk that is complete waits for its place. One that is not when its place
comes is sent as it is, zeros for what is missing. Gradients that arrive later still, which takes another order of
execution than the traced one, and those of a chunk that gets none in the traced step, leave their block for the home
of the states. There each rank keeps them to itself, unreduced, until the next backward that sends the chunk, or until
the optimizer steps, before which all ranks learn of them. From then on every backward sends the chunk.

Replicas sum their gradients once per step: in the last backward that it is planned with, or before the optimizer steps.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.gradients.chunk_gradient import ChunkGradient, GradientBlocks, OpenChunk
from elixir.chunk.gradients.transport import Transport
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import HostBuffers
from elixir.chunk.lanes import Lanes
from elixir.chunk.memory import Arena
from elixir.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """How gradients go home.

    Attributes:
        block_count: how many gradient blocks there are.
        block_bytes: size of one.
        reduce_fp32: sum over the ranks in float32.
        overlap: gradients larger than a block leave while backward goes on; otherwise it waits for them.
        places: chunk -> the position of the order after which it is sent; chunks without one come last.
        accumulation: backwards that a step is planned with; norms of sums, and sums over replicas, are made in the last
            one.
    """

    block_count: int
    block_bytes: int
    reduce_fp32: bool = False
    overlap: bool = True
    places: Mapping[int, int] = field(default_factory=dict)
    accumulation: int = 1


def send_positions(chunks: Iterable[Chunk], schedule: Schedule) -> dict[int, int]:
    """By chunk, the position after whose loads it is reduced: the last one that loads before its last gradient, or
    -1."""
    loading = schedule.loading
    return {
        chunk.index: ([-1, *loading])[bisect_right(loading, chunk.plan.grad_entry)]
        for chunk in chunks
        if chunk.plan.grad_entry is not None
    }


class GradientFlow:
    """Takes gradients from autograd to their homes.

    Args:
        chunks: trainable chunks whose gradients are gathered in blocks, in the order in which ranks send them.
        arena: makes the memory.
        lanes: network and offload are used.
        group: over which gradients are averaged.
        buffers: have the kind `SUMMANDS`.
        options: how.
        complete: called, in backward, with a chunk all of whose gradients are on their way home.
        wants_norms: called, in backward, to know whether the step will ask for the norm of the gradients.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        arena: Arena,
        lanes: Lanes,
        group: Group,
        buffers: HostBuffers,
        options: FlowOptions,
        complete: Callable[[Chunk], None] | None = None,
        wants_norms: Callable[[], bool] = lambda: False,
    ) -> None:
        self._lanes, self._group, self._options = lanes, group, options
        self._complete, self._wants_norms = complete, wants_norms
        self._device = arena.device
        self._backwards = 0  # since gradients were last cleared
        self._blocks = GradientBlocks(arena, options.block_count, options.block_bytes)
        self._transport = Transport(lanes, group, buffers, arena.device, reduce_fp32=options.reduce_fp32)
        self._position = -1  # of the order; its loads have been sent
        self._unsent: list[ChunkGradient] = []  # with several ranks: still to be sent in this backward, in order
        self._unsettled = False  # a backward is over, and late gradients have not been asked for
        self._is_done: Callable[[nn.Parameter], bool] | None = None  # in a pass of several micro-batches
        self._lock = threading.RLock()
        self._awaited = {chunk.index for chunk in chunks if chunk.plan.reduce_order is not None}
        """Chunks that several ranks send in every backward, on all ranks the same."""
        self.by_chunk = {chunk.index: ChunkGradient(chunk, arena) for chunk in chunks}

    @property
    def extra_blocks(self) -> int:
        """Blocks beyond the plan's, made because a chunk that others wait for never got its gradients."""
        return self._blocks.extra

    @property
    def backward_count(self) -> int:
        """Backwards since gradients were last cleared, one that runs now included."""
        return self._backwards

    def take(self, chunk: Chunk, slot: Slot, gradient: torch.Tensor) -> None:
        """Takes a gradient of one parameter that has arrived; the caller lets go of `gradient`, which nobody else
        holds."""
        with self._lock:
            mine = self.by_chunk[chunk.index]
            opened = mine.opened
            # With several ranks a chunk is reduced in memory that is padded, so it is copied.
            if opened is None and self._group.size == 1 and self._is_done is None:
                adopted = self._blocks.adopt(chunk, gradient, counted=self._options.overlap)
                if adopted is not None:
                    mine.open(adopted).arrived.add(slot.name)
                    self._send(chunk)
                    if not self._options.overlap:
                        self._blocks.wait_for_last()
                    return
            if opened is not None and slot.name in opened.arrived and self._adds_to_held(mine, slot):
                # A reentrant backward inside of this one: PyTorch adds each part to the gradient there is, (old + a) +
                # b, whose bits old + (a + b) would not have.
                self._send(chunk)
                opened = None
            if opened is None:
                opened = mine.open(self._opened(chunk))
            part = opened.part_of(slot)
            if slot.name in opened.arrived:
                part.add_(gradient)  # another part of the graph used it too
            else:
                part.copy_(gradient)
                opened.arrived.add(slot.name)
            if self._may_leave(mine):
                if self._group.size == 1:
                    self._send(chunk)
                elif mine in self._unsent:
                    self._send_in_order()
                else:
                    self._keep(mine)  # no other rank sends it in this backward

    def _adds_to_held(self, gradient: ChunkGradient, slot: Slot) -> bool:
        """Whether a gradient of an earlier backward is at home, on the only rank. Several round as their sums do."""
        alone = self._group.size == 1 and self._is_done is None
        return alone and gradient.holds and slot.name in gradient.arrived

    def hold_until(self, is_done: Callable[[nn.Parameter], bool] | None) -> None:
        """Lets a chunk stay in its block while gradients of further micro-batches come.

        Args:
            is_done: whether all gradients of a parameter have come; None: with the first one they have.
        """
        self._is_done = is_done

    def release(self) -> None:
        """Sends the chunks all of whose gradients have come, now that more parameters are done."""
        with self._lock:
            if self._group.size > 1:
                self._send_in_order()
                return
            for gradient in sorted((g for g in self.by_chunk.values() if g.opened is not None), key=_number):
                if self._may_leave(gradient):
                    self._send(gradient.chunk)

    def _may_leave(self, gradient: ChunkGradient) -> bool:
        """Whether nothing more comes to a chunk. In a pass, that also holds for parameters that got no gradient."""
        if self._is_done is None:
            return gradient.is_complete
        return all(self._is_done(slot.parameter) for slot in gradient.chunk.slots)

    def begin(self) -> None:
        """Begins the backward part of the order."""
        with self._lock:
            self._backwards += 1
            self._lanes.counts.backwards += 1
            self._position = -1
            awaited = [gradient for index, gradient in self.by_chunk.items() if index in self._awaited]
            self._unsent = awaited if self._group.size > 1 else []

    @property
    def untraced(self) -> frozenset[int]:
        """Chunks that several ranks send in every backward, although they got no gradient in the traced step."""
        return frozenset(i for i in self._awaited if self.by_chunk[i].chunk.plan.reduce_order is None)

    def leave(self, position: int) -> None:
        """Sends what has its place before the loads of `position`, complete or not."""
        with self._lock:
            while self._unsent and self._options.places.get(self._unsent[0].chunk.index, position) < position:
                self._send(self._unsent.pop(0).chunk)

    def enter(self, position: int) -> None:
        """Notes that the loads of `position` have been sent."""
        with self._lock:
            self._position = position
            self._send_in_order()

    def flush(self) -> None:
        """Sends what is left after backward, on every rank alike."""
        with self._lock:
            if self._group.size > 1:
                self._unsettled = True
            else:
                self._unsent = sorted((g for g in self.by_chunk.values() if g.opened is not None), key=_number)
            while self._unsent:
                self._send(self._unsent.pop(0).chunk)
            for late in self.by_chunk.values():
                self._keep(late)  # its block is the next forward's, and the next backward's

    def is_partial(self, chunk: Chunk) -> bool:
        """Whether a chunk's gradients are to be summed over the replicas yet."""
        return self.by_chunk[chunk.index].is_partial is True

    def settle(self) -> None:
        """Blocks until every gradient is at its home; with several ranks, all must call it."""
        self.send_late()
        self._wait()

    def send_late(self) -> None:
        """Sends home every gradient that has not left yet; with several ranks, all must call it.

        Nobody waits for their arrival: `ChunkGradient.memory` is for those who read them. Compute waits for memory
        beyond the gradient blocks, of which the plan has none for the next forward.
        """
        if self._unsettled:
            self._unsettled = False
            self._send_late()
        with self._lock:
            self._blocks.reclaim_extra()

    def holds(self, chunk: Chunk, name: str) -> bool:
        """Whether this rank got a gradient of a parameter since they were last cleared."""
        return chunk.index in self.by_chunk and self.by_chunk[chunk.index].has(name)

    def any_held(self) -> bool:
        """Whether this rank got any gradient since they were last cleared."""
        return any(own.opened is not None or own.kept is not None or own.arrived for own in self.by_chunk.values())

    def dropped(self) -> None:
        """Counts backwards anew if `drop` has left no gradient; all ranks call this alike."""
        with self._lock:
            is_any_left = any(own.holds for own in self.by_chunk.values())  # on all ranks alike
            self._backwards = self._backwards if is_any_left else 0

    def clear(self) -> None:
        """Forgets all gradients, also those on their way."""
        with self._lock:
            self._blocks.reclaim_extra()
            self._backwards = 0
            for gradient in self.by_chunk.values():
                self._give_up(gradient)
                gradient.clear()
            self._unsent = []
            self._unsettled = False

    def hold(self, names: Collection[str]) -> None:
        """Puts zeros where this rank has no gradient of these parameters, of which some rank has one."""
        with self._lock:
            for gradient in self.by_chunk.values():
                if any(slot.name in names for slot in gradient.chunk.slots):
                    gradient.hold_zeros()

    def drop(self, chunk: Chunk, name: str) -> None:
        """Forgets the gradient of one parameter, as ``parameter.grad = None`` does; all ranks must do the same."""
        with self._lock:
            gradient = self.by_chunk.get(chunk.index)
            if gradient is None:
                return
            if gradient.opened is not None:
                gradient.opened.arrived.discard(name)
                if not gradient.opened.arrived:
                    self._give_up(gradient)
            gradient.drop(name, self._lanes.offload, one_rank=self._group.size == 1)

    def _give_up(self, gradient: ChunkGradient) -> None:
        """Closes the open block of a chunk and frees its memory."""
        opened = gradient.close()
        if opened is not None:
            self._blocks.give_back(opened.memory)

    def _wait(self) -> None:
        for gradient in self.by_chunk.values():
            gradient.memory.synchronize()  # this thread may read the shard next
        with self._lock:
            self._blocks.reclaim_all()

    def _send_late(self) -> None:
        """Sends what arrived after its chunk had been sent, on any rank, and what a backward has left that raised."""
        mine = [index for index, own in self.by_chunk.items() if own.opened or own.kept]
        answers: list[list[int]] = self._lanes.network.ask(lambda: self._group.exchange("late gradients", mine))
        late = [index for index in self.by_chunk if any(index in theirs for theirs in answers)]
        with self._lock:
            self._awaited |= set(late)
            for index in late:
                self._send(self.by_chunk[index].chunk, late=True)
            for gradient in self.by_chunk.values():
                if gradient.is_partial:
                    self._transport.finish(gradient)

    def _send_in_order(self) -> None:
        while self._unsent:
            gradient = self._unsent[0]
            if gradient.opened is None or not self._may_leave(gradient):
                return
            if self._options.places.get(gradient.chunk.index, self._position + 1) > self._position:
                return  # gathers come first, on other ranks too
            self._unsent.pop(0)
            self._send(gradient.chunk)

    def _opened(self, chunk: Chunk) -> OpenChunk:
        if self._group.size > 1 and self._blocks.are_taken:
            # The plan has no block for those that are sent when backward is over, or not in this one.
            arriving = [own for own in self.by_chunk.values() if own.opened is not None]
            late = [own for own in arriving if own.chunk.plan.reduce_order is None or own not in self._unsent]
            if late:
                self._keep(min(late, key=_number))
        return self._blocks.open(chunk)

    def _send(self, chunk: Chunk, *, late: bool = False) -> None:
        """Lets a chunk's gradients leave its block.

        Args:
            late: backward is over, so that no new states are made in there.
        """
        gradient = self.by_chunk[chunk.index]
        opened = gradient.close() or self._opened(chunk)
        opened.fill_gaps(chunk)
        # What all replicas have summed must not be mixed with what they have not.
        whole = late or gradient.is_partial is False or self._backwards >= self._options.accumulation
        over = whole and self._group.replicas > 1
        try:
            self._transport.send(gradient, opened, with_norms=self._sums_norms(chunk), over_replicas=over)
        except BaseException:  # a CUDA lane has issued the copy here and now
            if opened.memory.tensor.nbytes == self._options.block_bytes:
                gradient.open(opened)  # `clear` gives the block back
            raise
        self._blocks.leave(opened)
        if self._complete is not None and not late and len(opened.arrived) == len(chunk.slots):
            self._complete(chunk)

    def _keep(self, gradient: ChunkGradient) -> None:
        """Lets what has arrived leave its block, to be kept by this rank."""
        opened = gradient.close()
        if opened is not None:
            self._transport.keep(gradient, opened)
            self._blocks.leave(opened)

    def _sums_norms(self, chunk: Chunk) -> bool:
        """Whether the norms of what is sent now are summed on the way; otherwise the step sums those that it needs.

        The step sums what stays on the device: compute does it there, and nobody waits. Of accumulated gradients only
        the last sum counts, so backwards before the planned number leave it out. A step that comes earlier reads the
        gradients itself.
        """
        is_last = self._backwards >= self._options.accumulation
        return chunk.plan.update_home == "host" and is_last and self._wants_norms()


def _number(gradient: ChunkGradient) -> int:
    """Number of the gradient's open block in the order of opening; 0 without one."""
    return 0 if gradient.opened is None else gradient.opened.number
