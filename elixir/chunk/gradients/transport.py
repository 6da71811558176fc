"""Takes a chunk's gradients from a full block to the home of the optimizer states.

On several ranks the block is first reduced over them, together with what this rank has kept to itself. Then this rank's
shard is copied home, or added to what is there. Replicas sum their shards once per step, in its last planned backward:
what is at home goes along, by way of the device. What leaves for the host is summed for the gradient norm before it
leaves, or, where it is added to earlier backwards, in the pass that adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from elixir.chunk.gradients.chunk_gradient import ChunkGradient, GradState, OpenChunk, PartNorms
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import SUMMANDS, HostBuffers
from elixir.chunk.lanes import Lanes, Work
from elixir.chunk.memory import Memory
from elixir.plan.step_traffic import all_reduce_bytes

Then = Callable[[torch.Tensor, torch.Tensor], object]
"""Work on this rank's reduced part, with the block that it came from."""


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
        self._counts = lanes.counts

    def send(self, gradient: ChunkGradient, opened: OpenChunk, *, with_norms: bool, over_replicas: bool) -> None:
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
        opened.is_extra = self._reduce_fp32 or gradient.kept is not None
        self._return_kept(gradient, opened)
        mine = block[chunk.mine]
        moved_bytes = gradient.memory.tensor.nbytes if chunk.plan.update_home == "host" else 0
        if self._group.size > 1:
            what = f"gradients of chunk {chunk.index}"
            then: list[Then] = []
            changed = [opened.memory]
            more_bytes = 0  # that the same lane moves
            if gradient.ends_partial(over_replicas):
                self._counts.host_to_device_bytes += moved_bytes
                then.append(self._joining(gradient))
                more_bytes += moved_bytes
                changed.append(gradient.memory)
            if over_replicas:
                then.append(self._over_replicas(mine.nbytes, what))
                more_bytes += all_reduce_bytes(mine.nbytes, self._group.replicas)
            if norms is not None and not adds:
                then.append(_measuring(norms))
                changed.append(norms.memory)
            mine = self._reduce(opened, mine, what, changed, then, more_bytes)
            if self._group.replicas > 1:
                gradient.is_partial = not over_replicas
        self._counts.device_to_host_bytes += moved_bytes
        if adds:
            home = [gradient.memory] if norms is None else [gradient.memory, norms.memory]
            self._add(self._adding(gradient, mine.numel(), norms), opened, mine, home, nbytes=moved_bytes)
        else:
            self._copy(gradient, opened, mine, norms if self._group.size == 1 else None, moved_bytes)
            if not gradient.holds:
                gradient.to(GradState.HOME)
        gradient.dropped.clear()
        if norms is not None:
            # The network's stream must not write to memory that compute was given back.
            opened.kept_alive += (norms.values,)

    def keep(self, gradient: ChunkGradient, opened: OpenChunk) -> None:
        """Adds a chunk's gradients to those that this rank keeps to itself."""
        opened.fill_gaps(gradient.chunk)
        kept, block = gradient.keep(opened, self._device).memory, opened.block
        moved_bytes = block.nbytes if gradient.chunk.plan.update_home == "host" else 0
        self._counts.device_to_host_bytes += moved_bytes
        self._add(kept.tensor.add_, opened, block, [kept], nbytes=moved_bytes)
        opened.kept_alive, opened.is_extra = (kept.tensor,), True

    def finish(self, gradient: ChunkGradient) -> None:
        """Sums over the replicas what is at home, since no backward has."""
        chunk, what = gradient.chunk, f"gradients of chunk {gradient.chunk.index}"
        home = gradient.memory.tensor[: chunk.shard_numel]
        gradient.is_partial, gradient.norms = False, None
        gradient.changes += 1
        dtype = torch.float32 if self._reduce_fp32 else home.dtype
        moved_bytes = home.nbytes if chunk.plan.update_home == "host" else 0
        self._counts.host_to_device_bytes += moved_bytes
        self._counts.device_to_host_bytes += moved_bytes
        over_replicas = self._over_replicas(home.nbytes, what)

        def add_up() -> None:
            here = home.to(self._device, dtype)
            over_replicas(here, here)
            home.copy_(here, non_blocking=True)  # which does nothing if they are one

        # The last gradients may still be on their way home.
        nbytes = 2 * moved_bytes + all_reduce_bytes(home.nbytes, self._group.replicas)
        self._lanes.network.submit(add_up, reads=[gradient.memory], writes=[gradient.memory], nbytes=nbytes)

    def _over_replicas(self, nbytes: int, what: str) -> Then:
        """Counts and returns the work that sums a shard of so many bytes over the replicas."""
        self._counts.replicas_bytes += all_reduce_bytes(nbytes, self._group.replicas)
        return lambda shard, _: self._group.sum_replicas(shard, what)

    def _joining(self, gradient: ChunkGradient) -> Then:
        """Returns the work that adds what is at home to a shard that was just reduced; parts that were dropped count
        as zero."""
        home, stale = gradient.memory.tensor[: gradient.chunk.shard_numel], gradient.parts_of(gradient.dropped)
        other = 0 if self._group.shard else 1

        def join(reduced: torch.Tensor, whole: torch.Tensor) -> None:
            for part in stale:
                part.zero_()
            # Other ranks have their parts of the block by now, so it has room for what is elsewhere.
            at_home = home.device == reduced.device
            here = home if at_home else whole.view(-1, home.numel())[other].copy_(home, non_blocking=True)
            reduced.add_(here)

        return join

    def _return_kept(self, gradient: ChunkGradient, opened: OpenChunk) -> None:
        """Adds what this rank has kept to itself to a block."""
        kept, gradient.kept = gradient.kept, None
        if kept is None:
            return
        gradient.arrived |= kept.arrived
        block, tensor = opened.block, kept.memory.tensor
        moved_bytes = tensor.nbytes if gradient.chunk.plan.update_home == "host" else 0
        self._counts.host_to_device_bytes += moved_bytes

        def add() -> None:
            block.add_(tensor.to(block.device))

        # The last gradients that were kept may still be on their way there.
        self._lanes.offload.submit(add, reads=[kept.memory], writes=[opened.memory], nbytes=moved_bytes)
        opened.kept_alive += (tensor,)
        kept.memory.free()

    def _reduce(
        self,
        opened: OpenChunk,
        mine: torch.Tensor,
        what: str,
        changed: Sequence[Memory],
        then: Sequence[Then],
        more_bytes: int,
    ) -> torch.Tensor:
        """Averages a block over the ranks; returns this rank's part of the mean.

        Args:
            opened: its block is overwritten.
            mine: this rank's part of it.
            what: is reduced; for messages.
            changed: memory that this and `then` change.
            then: done next with this rank's part, and with the block.
            more_bytes: moved by `then`.
        """
        block = opened.block
        # In place where the dtype allows: the block has room for the result.
        reduced = torch.empty_like(mine, dtype=torch.float32) if self._reduce_fp32 else mine

        def reduce() -> None:
            wide = block.float() if self._reduce_fp32 else block  # now: what was kept has been added
            self._group.reduce_mean(reduced, wide, what)
            for work in then:
                work(reduced, wide)

        sent_bytes = block.nbytes - mine.nbytes
        self._counts.network_bytes += sent_bytes
        # Overlaps with backward. What was kept must be in the block before it is averaged.
        self._lanes.network.submit(reduce, reads=changed, writes=changed, nbytes=sent_bytes + more_bytes)
        opened.kept_alive += (reduced,)
        return reduced

    def _add(
        self,
        add: Callable[[torch.Tensor], object],
        opened: OpenChunk,
        gradients: torch.Tensor,
        home: Sequence[Memory],
        *,
        nbytes: int,
    ) -> None:
        """Adds `gradients` to those of earlier backwards.

        From a CUDA device to the host they pass through a pinned buffer, and a thread of the host adds them: the
        thread that submits compute goes on.

        Args:
            add: does it, with the gradients where those are.
            opened: the block that they leave.
            gradients: on the device, in the block or what it was reduced to.
            home: memory that this changes: first theirs, on the device or the host.
            nbytes: moved between device and host.
        """
        lanes, block = self._lanes, opened.memory
        if gradients.device == home[0].tensor.device:
            # Both lie on one device, yet compute does not add them: it would wait for the reduction.
            lanes.offload.submit(partial(add, gradients), reads=[block, *home], writes=home, nbytes=nbytes)
            return
        buffer = self._buffers.take(SUMMANDS, gradients.nbytes)
        here = buffer.view(gradients.numel(), gradients.dtype)
        copy = partial(here.copy_, gradients, non_blocking=True)
        lanes.offload.submit(copy, reads=[block], writes=[buffer], nbytes=nbytes)
        # CPU Adam's thread adds them, so that the thread that submits compute goes on.
        lanes.host_adam.submit(partial(add, here), reads=[buffer, *home], writes=home)

    def _copy(
        self, gradient: ChunkGradient, opened: OpenChunk, mine: torch.Tensor, norms: PartNorms | None, nbytes: int
    ) -> None:
        """Copies this rank's shard home, and sums it for `norms`, unless the reduction has."""
        home = gradient.memory.tensor[: mine.numel()]
        copy: Work = partial(home.copy_, mine, non_blocking=True)
        written = [gradient.memory]
        if norms is not None and mine.is_cuda:
            norms.measure(mine)  # by compute, which has just written this and waits for nobody
        elif norms is not None:
            copy = partial(_measure_and_copy, norms, mine, home)
            written.append(norms.memory)
        # Overlaps with backward, which computes the next gradients into another block.
        self._lanes.offload.submit(copy, reads=[opened.memory], writes=written, nbytes=nbytes)

    @staticmethod
    def _adding(gradient: ChunkGradient, numel: int, norms: PartNorms | None) -> Callable[[torch.Tensor], object]:
        """Returns the work that adds gradients to those at home; parts that were dropped count as zero."""
        home, stale = gradient.memory.tensor[:numel], gradient.parts_of(gradient.dropped)

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
