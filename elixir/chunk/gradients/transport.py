"""Takes a chunk's gradients from a full block to the home of the optimizer states.

On several ranks the block is first reduced over them, together with what this rank has kept to itself. Then this rank's
shard is copied home, or added to what is there. Replicas sum their shards once per step, in its last planned backward:
what is at home goes along, by way of the device. What leaves for the host is summed for the gradient norm before it
leaves, or, where it is added to earlier backwards, in the pass that adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from elixir.chunk.gradients.chunk_gradient import ChunkGradient, GradState, OpenChunk
from elixir.chunk.gradients.gradient_blocks import Leaving
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import SUMMANDS, HostBuffers
from elixir.chunk.lanes import Lanes, Ticket, Work, settled
from elixir.chunk.part_norms import PartNorms
from elixir.plan.step_traffic import all_reduce_bytes

Then = Callable[[torch.Tensor, torch.Tensor], object]
"""Work on this rank's reduced part, with the block that it came from."""


@dataclass
class MovedBytes:
    """Bytes of gradients that were moved since a step began."""

    offloaded: int = 0
    """Device to host."""
    returned: int = 0
    """Host to device: gradients that a rank had kept to itself, added to the next that are reduced."""
    network: int = 0
    """Received from other ranks of the replica."""
    replicas: int = 0
    """Received from other replicas."""


class Transport:
    """Submits the work that takes gradients home.

    Args:
        lanes: network and offload are used, and the CPU Adam's, which has nothing to do while gradients are added.
        group: over which gradients are averaged.
        buffers: have the kind `SUMMANDS`.
        device: where gradients are made.
        reduce_fp32: sum over the ranks in float32.
    """

    def __init__(
        self, lanes: Lanes, group: Group, buffers: HostBuffers, device: torch.device, *, reduce_fp32: bool
    ) -> None:
        self._lanes, self._group, self._buffers, self._device = lanes, group, buffers, device
        self._reduce_fp32 = reduce_fp32
        self.moved = MovedBytes()

    def send(self, gradient: ChunkGradient, opened: OpenChunk, *, with_norms: bool, over_replicas: bool) -> Leaving:
        """Reduces a chunk's gradients, and lets this rank's shard leave for its home.

        Args:
            gradient: of the chunk, with no block open.
            opened: all gradients of the chunk, zeros for those that did not come.
            with_norms: sum the norms of what is at home then.
            over_replicas: they are summed over the replicas as well, with those at home that have not been.
        """
        chunk, block = gradient.chunk, opened.block
        gradient.make_memory()
        gradient.arrived |= opened.arrived
        adds = gradient.holds and not gradient.ends_partial(over_replicas)
        norms = PartNorms(chunk, "cpu" if adds else self._device) if with_norms else None
        gradient.norms = norms
        gradient.changes += 1
        # They use the shard that is written below: the step before, or new states that are being made, may still read
        # it, and what was cleared may still arrive there.
        used = gradient.uses.to_write()
        has_kept = gradient.kept is not None
        written, kept_alive = self._return_kept(gradient, block)
        mine = block[chunk.mine]
        moved_bytes = gradient.memory.nbytes if chunk.plan.update_home == "host" else 0
        if self._group.size > 1:
            what = f"gradients of chunk {chunk.index}"
            after = written
            then: list[Then] = []
            more_bytes = 0  # that the same lane moves
            if gradient.ends_partial(over_replicas):
                self.moved.returned += moved_bytes
                then.append(self._joining(gradient))
                more_bytes += moved_bytes
                after = [*written, *used]  # `used` writes what is at home, which is added
            if over_replicas:
                then.append(self._over_replicas(mine.nbytes, what))
                more_bytes += all_reduce_bytes(mine.nbytes, self._group.replicas)
            if norms is not None and not adds:
                then.append(_measuring(norms))
            mine, reduced = self._reduce(block, mine, what, after, then, more_bytes)
            written, kept_alive = [reduced], (mine, *kept_alive)
            if self._group.replicas > 1:
                gradient.is_partial = not over_replicas
        self.moved.offloaded += moved_bytes
        if adds:
            add = self._adding(gradient, mine.numel(), norms)
            home = gradient.memory[: mine.numel()]  # but for padding, all of it
            gone, ready = self._add(add, mine, home, written=written, used=used, nbytes=moved_bytes)
            summed: Ticket | None = ready
        else:
            gone = ready = self._copy(gradient, mine, norms, written, used, moved_bytes)
            # On CUDA compute has summed what was not reduced, and nobody waits for that.
            summed = written[-1] if written else None if block.is_cuda else gone
            if not gradient.holds:
                gradient.to(GradState.HOME)
        gradient.uses.written_by(ready)
        gradient.dropped.clear()
        if norms is not None:
            norms.ready = summed
            # The network's stream must not write to memory that compute was given back.
            kept_alive = (*kept_alive, norms.values)
        return Leaving(opened.memory, gone, kept_alive, self._reduce_fp32 or has_kept)

    def keep(self, gradient: ChunkGradient, opened: OpenChunk) -> Leaving:
        """Adds a chunk's gradients to those that this rank keeps to itself."""
        opened.fill_gaps(gradient.chunk)
        kept, block = gradient.keep(opened, self._device), opened.block
        moved_bytes = block.nbytes if gradient.chunk.plan.update_home == "host" else 0
        self.moved.offloaded += moved_bytes
        used = kept.uses.to_write()
        gone, added = self._add(kept.memory.add_, block, kept.memory, used=used, nbytes=moved_bytes)
        kept.uses.written_by(added)
        return Leaving(opened.memory, gone, (kept.memory,), is_extra=True)

    def finish(self, gradient: ChunkGradient) -> None:
        """Sums over the replicas what is at home, since no backward has."""
        chunk, what = gradient.chunk, f"gradients of chunk {gradient.chunk.index}"
        home = gradient.memory[: chunk.shard_numel]
        gradient.is_partial, gradient.norms = False, None
        gradient.changes += 1
        dtype = torch.float32 if self._reduce_fp32 else home.dtype
        moved_bytes = home.nbytes if chunk.plan.update_home == "host" else 0
        self.moved.returned += moved_bytes
        self.moved.offloaded += moved_bytes
        over_replicas = self._over_replicas(home.nbytes, what)

        def add_up() -> None:
            here = home.to(self._device, dtype)
            over_replicas(here, here)
            home.copy_(here, non_blocking=True)  # which does nothing if they are one

        # The last gradients may still be on their way home.
        nbytes = 2 * moved_bytes + all_reduce_bytes(home.nbytes, self._group.replicas)
        done = self._lanes.network.submit(add_up, after=gradient.uses.to_write(), nbytes=nbytes)
        gradient.uses.written_by(done)

    def _over_replicas(self, nbytes: int, what: str) -> Then:
        """Counts and returns the work that sums a shard of so many bytes over the replicas."""
        self.moved.replicas += all_reduce_bytes(nbytes, self._group.replicas)
        return lambda shard, _: self._group.sum_replicas(shard, what)

    def _joining(self, gradient: ChunkGradient) -> Then:
        """Returns the work that adds what is at home to a shard that was just reduced; parts that were dropped count
        as zero."""
        home, stale = gradient.memory[: gradient.chunk.shard_numel], gradient.parts_of(gradient.dropped)
        other = 0 if self._group.shard else 1

        def join(reduced: torch.Tensor, whole: torch.Tensor) -> None:
            for part in stale:
                part.zero_()
            # Other ranks have their parts of the block by now, so it has room for what is elsewhere.
            at_home = home.device == reduced.device
            here = home if at_home else whole.view(-1, home.numel())[other].copy_(home, non_blocking=True)
            reduced.add_(here)

        return join

    def _return_kept(
        self, gradient: ChunkGradient, block: torch.Tensor
    ) -> tuple[list[Ticket], tuple[torch.Tensor, ...]]:
        """Adds what this rank has kept to itself to `block`; returns tickets of that, and the tensors that it reads."""
        kept = gradient.give_up_kept()
        if kept is None:
            return [], ()
        gradient.arrived |= kept.arrived
        memory = kept.memory
        moved_bytes = memory.nbytes if gradient.chunk.plan.update_home == "host" else 0
        self.moved.returned += moved_bytes

        def add() -> None:
            block.add_(memory.to(block.device))

        # The last gradients that were kept may still be on their way to `memory`.
        return [self._lanes.offload.submit(add, after=kept.uses.to_read(), nbytes=moved_bytes)], (memory,)

    def _reduce(
        self,
        block: torch.Tensor,
        mine: torch.Tensor,
        what: str,
        written: list[Ticket],
        then: Sequence[Then],
        more_bytes: int,
    ) -> tuple[torch.Tensor, Ticket]:
        """Averages `block` over the ranks; returns this rank's part of the mean, and its ticket.

        Args:
            block: is overwritten.
            mine: this rank's part of it.
            what: is reduced; for messages.
            written: tickets of what writes `block`, or what `then` reads.
            then: done next with this rank's part, and with the block.
            more_bytes: moved by `then`.
        """
        # In place where the dtype allows: the block has room for the result.
        reduced = torch.empty_like(mine, dtype=torch.float32) if self._reduce_fp32 else mine

        def reduce() -> None:
            wide = block.float() if self._reduce_fp32 else block  # now: what was kept has been added
            self._group.reduce_mean(reduced, wide, what)
            for work in then:
                work(reduced, wide)

        sent_bytes = block.nbytes - mine.nbytes
        self.moved.network += sent_bytes
        # Overlaps with backward. What was kept must be in the block before it is averaged.
        return reduced, self._lanes.network.submit(reduce, after=written, nbytes=sent_bytes + more_bytes)

    def _add(
        self,
        add: Callable[[torch.Tensor], object],
        gradients: torch.Tensor,
        home: torch.Tensor,
        *,
        written: Sequence[Ticket] = (),
        used: Sequence[Ticket],
        nbytes: int,
    ) -> tuple[Ticket, Ticket]:
        """Adds `gradients` to those of earlier backwards, in `home`.

        From a CUDA device to the host they pass through a pinned buffer, and a thread of the host adds them: the
        thread that submits compute goes on.

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
            # Both lie on one device, yet compute does not add them: it would wait for the reduction. `written` fills
            # `gradients`; `used` reads or writes `home`, which this changes.
            done = self._lanes.offload.submit(partial(add, gradients), after=[*written, *used], nbytes=nbytes)
            return done, done
        buffer = self._buffers.take(SUMMANDS, gradients.nbytes)
        here = buffer.view(gradients.numel(), gradients.dtype)
        copy = partial(here.copy_, gradients, non_blocking=True)
        # `written` fills `gradients`; the sum before may still read the buffer that is overwritten, whether or not it
        # has failed.
        free = settled(buffer.uses.to_write())
        gone = self._lanes.offload.submit(copy, after=[*written, *free], nbytes=nbytes)
        # CPU Adam's thread adds them, so that the thread that submits compute goes on. `gone` fills the buffer; `used`
        # reads or writes `home`, which this changes.
        added = self._lanes.host_adam.submit(partial(add, here), after=[gone, *used])
        return gone, buffer.uses.written_by(added)

    def _copy(
        self,
        gradient: ChunkGradient,
        mine: torch.Tensor,
        norms: PartNorms | None,
        written: list[Ticket],
        used: list[Ticket],
        nbytes: int,
    ) -> Ticket:
        """Copies this rank's shard home, and sums it for the norm if the reduction has not."""
        home = gradient.memory[: mine.numel()]
        copy: Work = partial(home.copy_, mine, non_blocking=True)
        if norms is not None and not written:
            if mine.is_cuda:
                norms.measure(mine)  # by compute, which has just written this and waits for nobody
            else:
                copy = partial(_measure_and_copy, norms, mine, home)
        # Overlaps with backward, which computes the next gradients into another block. `written` fills `mine`; `used`
        # reads or writes `home`.
        return self._lanes.offload.submit(copy, after=[*used, *written], nbytes=nbytes)

    @staticmethod
    def _adding(gradient: ChunkGradient, numel: int, norms: PartNorms | None) -> Callable[[torch.Tensor], object]:
        """Returns the work that adds gradients to those at home; parts that were dropped count as zero."""
        home, stale = gradient.memory[:numel], gradient.parts_of(gradient.dropped)

        def add(gradients: torch.Tensor) -> None:
            for part in stale:
                part.zero_()
            if norms is None:
                home.add_(gradients)
            else:
                norms.add_and_measure(home, gradients)

        return add


def _measuring(norms: PartNorms) -> Then:
    return lambda reduced, _: norms.measure(reduced)


def _measure_and_copy(norms: PartNorms, gradients: torch.Tensor, home: torch.Tensor) -> None:
    norms.measure(gradients)
    home.copy_(gradients)
