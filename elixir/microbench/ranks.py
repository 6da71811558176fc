"""The processes that measure at once: a single one, or those that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elixir.errors import InputError, RankError

GROUP_TIMEOUT = timedelta(minutes=10)
"""Rank 0 measures for a minute or two while the others wait."""


@dataclass(frozen=True)
class Ranks:
    """How many processes measure, and which of them this one is. With one, everything here is free of cost."""

    size: int = 1
    rank: int = 0
    local_size: int = 1
    """How many of them are on this machine."""
    local_rank: int = 0

    @property
    def machines(self) -> int:
        """How many machines they are on; 1 also if those do not have as many each."""
        return 1 if self.size % self.local_size else self.size // self.local_size

    def barrier(self) -> None:
        """Waits for all."""
        self.slowest(0.0)

    def slowest(self, value: float) -> float:
        """The largest value of any rank."""
        return float(max(self.exchange(value)))

    def least(self, value: float) -> float:
        """The smallest value of any rank."""
        return float(min(self.exchange(value)))

    def share(self, value: Any) -> Any:
        """The value that rank 0 passed."""
        return self.exchange(value)[0]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value)  # on the host, by gloo
        except RuntimeError as error:
            raise RankError(f"another rank is gone while measuring; see its message. From torch: {error}") from None
        return values


ALONE = Ranks()
"""The one process of a measurement without torchrun."""


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the ranks that torchrun started in a process group until the end; gives one rank without torchrun.

    The group has NCCL, too, if every rank has its own device.

    Raises:
        InputError: the environment that torchrun sets is incomplete.
        RankError: the ranks do not find each other.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    except (KeyError, ValueError) as error:
        raise InputError(
            f"WORLD_SIZE is set, but RANK or its companions are missing or no numbers ({error}): start with torchrun, "
            "or unset it"
        ) from None
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=GROUP_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} of {size} cannot join the others: {error}") from None
    try:
        yield Ranks(size, rank, local_size, local_rank)
    finally:
        dist.destroy_process_group()
