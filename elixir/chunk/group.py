"""The ranks that share a model: collectives over flat buffers, or nothing at all for one rank.

All ranks must issue the same collectives in the same order, or what arrives is another chunk's. Every rank keeps a
digest of what it has issued; whenever values are exchanged, and at least once before every optimizer step, the digests
are compared, so that ranks that went different ways stop with an error instead of training on.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elixir.errors import RankError

# torch 2.13 has new names for these and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PIECE_BYTES = 2**28
"""Sent at once from rank 0, so that no backend has to take a whole embedding table in one message."""


class Group:
    """A process group, seen by chunks.

    Its collectives run beside compute, so they have groups of their own: on the caller's group they would come between
    the caller's own collectives, in an order that differs from rank to rank. Chunks travel in one that is like the
    caller's; small values on the host in a second one, over gloo. Both have the timeout of the caller's.

    Args:
        process_group: None means the default group where one is initialised, else a single rank.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        self.size: int = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank: int = 0 if process_group is None else dist.get_rank(process_group)
        self._data: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._issued = 0
        self._digest = 0
        self._broken: RankError | None = None
        if process_group is not None and self.size > 1:
            ranks = dist.get_process_group_ranks(process_group)
            # The ranks outside of a smaller group do not get here, so those inside agree among themselves.
            local = len(ranks) < dist.get_world_size()
            timeout = _timeout(process_group)
            backend = dist.get_backend_config(process_group)  # a new group would otherwise have the default group's
            self._data = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=local)
            self._control = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=local)

    def close(self) -> None:
        """Give the groups back."""
        for group in (self._data, self._control):
            if group is not None:
                dist.destroy_process_group(group)
        self._data = self._control = None

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, what: str = "weights") -> None:
        """Fill `whole` with every rank's `shard`, which may be this rank's part of it.

        Raises:
            RankError: another rank is gone, or does something else.
        """
        if self.size > 1:
            with self._issuing(f"gather {what}"):
                _all_gather(whole, shard, group=self._data)
        elif whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard, non_blocking=True)

    def reduce_mean(self, shard: torch.Tensor, whole: torch.Tensor, what: str = "gradients") -> None:
        """Fill `shard` with this rank's part of the mean of every rank's `whole`, which is overwritten.

        Raises:
            RankError: another rank is gone, or does something else.
        """
        if self.size > 1:
            with self._issuing(f"reduce {what}"):
                whole.div_(self.size)
                _reduce_scatter(shard, whole, group=self._data)
        elif whole.data_ptr() != shard.data_ptr():
            shard.copy_(whole, non_blocking=True)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, which can be pickled, in order of rank. Blocks until all ranks are here.

        Args:
            what: for which purpose; the same on all ranks.

        Raises:
            RankError: another rank is gone, is here for another purpose, or has issued other collectives than this one.
        """
        if self.size == 1:
            return [value]
        mine = (what, self._issued, self._digest)
        gathered: list[Any] = [None] * self.size
        with self._issuing(what):
            dist.all_gather_object(gathered, (mine, value), group=self._control)
            for rank, (theirs, _) in enumerate(gathered):
                if theirs != mine:
                    raise RankError(
                        f"rank {self.rank} is at {what!r} after {mine[1]} collectives, rank {rank} at {theirs[0]!r} "
                        f"after {theirs[1]}{' others' if theirs[1] == mine[1] else ''}: the ranks no longer do the "
                        "same; every rank must call forward, backward and step equally often, and use what the plan "
                        "does not foresee on all ranks alike or inside `model.gathered()`"
                    )
        return [value for _, value in gathered]

    def note(self, what: str) -> None:
        """Take down something that all ranks must do at this point, to be compared with the next exchange."""
        with self._issuing(what):
            pass

    def send_from_rank_0(self, value: torch.Tensor) -> None:
        """Give every rank rank 0's `value`, a contiguous one on the CPU, in place and in pieces.

        Raises:
            RankError: another rank is gone, or does something else.
        """
        if self.size > 1:
            source = dist.get_global_rank(self._control, 0) if self._control is not None else 0
            with self._issuing("send from rank 0"):
                # As bytes: what a backend can send does not depend on the dtype then.
                for piece in value.view(-1).view(torch.uint8).split(_PIECE_BYTES):
                    dist.broadcast(piece, source, group=self._control)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place, added up in order of rank."""
        if self.size > 1:
            total = torch.zeros_like(value)
            for theirs in self.exchange("sum", value.cpu()):
                total.add_(theirs)
            value.copy_(total)
        return value

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The maximum over all ranks, in place; NaN where any rank has it."""
        if self.size > 1:
            value.copy_(torch.stack(self.exchange("largest", value.cpu())).amax(0))
        return value

    @contextlib.contextmanager
    def _issuing(self, what: str) -> Iterator[None]:
        if self._broken is not None:
            raise self._broken  # the others are gone: no second timeout
        self._issued += 1
        self._digest = zlib.crc32(what.encode(), self._digest)
        try:
            yield
        except RankError as error:
            self._broken = error
            raise
        except RuntimeError as error:
            self._broken = RankError(
                f"rank {self.rank}: {what} (collective {self._issued}) failed, because another rank has died, has "
                f"raised an error, or does something else; see the messages of the others. From torch: {error}"
            )
            raise self._broken from error


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """That of a group, which new groups do not take over by themselves; None for the backend's default."""
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            found = group._get_backend(torch.device(device)).options._timeout
            if isinstance(found, timedelta):
                return found
    return None
