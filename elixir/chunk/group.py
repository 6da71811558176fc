"""The ranks that share a model: collectives over flat buffers, or nothing at all for one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Group:
    """A process group, seen by chunks.

    Its collectives run beside compute, so they have a group of their own: on the caller's group they would come between
    the caller's own collectives, in an order that differs from rank to rank.

    Args:
        process_group: None means the default group where one is initialised, else a single rank.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        self.size: int = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank: int = 0 if process_group is None else dist.get_rank(process_group)
        self._group: dist.ProcessGroup | None = None
        if process_group is not None and self.size > 1:
            ranks = dist.get_process_group_ranks(process_group)
            # The ranks outside of a smaller group do not get here, so those inside agree among themselves.
            self._group = dist.new_group(ranks, use_local_synchronization=len(ranks) < dist.get_world_size())

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill `whole` with every rank's `shard`, which may be this rank's part of it."""
        if self.size > 1:
            dist.all_gather_into_tensor(whole, shard, group=self._group)
        elif whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard, non_blocking=True)

    def reduce_mean(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill `shard` with this rank's part of the mean of every rank's `whole`, which is overwritten."""
        if self.size > 1:
            whole.div_(self.size)
            dist.reduce_scatter_tensor(shard, whole, group=self._group)
        elif whole.data_ptr() != shard.data_ptr():
            shard.copy_(whole, non_blocking=True)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self._group)
        return value

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return value

    def same_everywhere(self, text: str) -> bool:
        """Whether every rank calls this with the same text."""
        if self.size == 1:
            return True
        gathered: list[str | None] = [None] * self.size
        dist.all_gather_object(gathered, text, group=self._group)
        return len(set(gathered)) == 1
