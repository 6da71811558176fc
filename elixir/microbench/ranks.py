"""The processes that measure at once: a single one, those that torchrun started, or two that are started here."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from elixir.errors import InputError, RankError

GROUP_TIMEOUT = timedelta(minutes=10)
"""Rank 0 measures for a minute or two while the others wait."""
SPAWNED_WAIT_S = 120.0
"""How long started processes may take altogether."""
_ANSWER = "answer"
"""Name of the file with what rank 0 of the started processes returned."""


@dataclass(frozen=True)
class Ranks:
    """How many processes measure, and which of them this one is. With one, everything here is free of cost."""

    size: int = 1
    rank: int = 0
    local_size: int = 1
    """How many of them are on this machine."""
    local_rank: int = 0
    control: Any = None
    """gloo group for small values on the host; None for one rank."""

    @property
    def machines(self) -> int:
        """How many machines they are on; 1 also if those do not have as many each."""
        return 1 if self.size % self.local_size else self.size // self.local_size

    def barrier(self) -> None:
        """Waits for all."""
        self.slowest(0.0)

    def slowest(self, value: float) -> float:
        """The largest value of any rank."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def least(self, value: float) -> float:
        """The smallest value of any rank."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def share(self, value: Any) -> Any:
        """The value that rank 0 passed."""
        return self.exchange(value)[0]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _named():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def _reduce(self, value: float, operation: Any) -> float:
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        with _named():
            dist.all_reduce(box, operation, group=self.control)
        return float(box)


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the ranks that torchrun started in a process group until the end; gives one rank without torchrun.

    Raises:
        InputError: the environment that torchrun sets is incomplete.
        RankError: the ranks do not find each other.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Ranks()
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
    with _group("env://", rank, size, local_rank) as control:
        yield Ranks(size, rank, local_size, local_rank, control)


def spawn(world_size: int, run: Callable[..., Any], *args: Any) -> Any:
    """``run(ranks, *args)`` in `world_size` new processes on this machine, joined by gloo; gives what rank 0 returned.

    They share the threads of this one. `run` must be importable, and the caller's main module safe to import.

    Raises:
        RankError: a process raised, ended early or took too long.
    """
    threads = max(1, torch.get_num_threads() // world_size)
    with tempfile.TemporaryDirectory(prefix="elixir-microbench-") as folder:
        given = (world_size, threads, folder, run, args)
        start: Any = start_processes  # carries no annotations
        started = start(_spawned, given, world_size, join=False, daemon=True)
        deadline_s = time.monotonic() + SPAWNED_WAIT_S
        try:
            while not started.join(max(0.0, deadline_s - time.monotonic())):
                if time.monotonic() > deadline_s:
                    raise RankError(
                        f"processes that were started to measure gave no answer within {SPAWNED_WAIT_S:g} s"
                    )
            return pickle.loads(Path(folder, _ANSWER).read_bytes())
        except (ProcessRaisedException, ProcessExitedException) as error:
            last_line = str(error).strip().splitlines()[-1]
            raise RankError(f"a process that was started to measure failed: {last_line}") from None
        finally:
            for process in started.processes:
                process.kill()  # it may be waiting for one that failed
                process.join()


def _spawned(rank: int, size: int, threads: int, folder: str, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    with _group(Path(folder, "store").as_uri(), rank, size, rank) as control:
        result = run(Ranks(size, rank, size, rank, control), *args)
        if rank == 0:
            Path(folder, _ANSWER).write_bytes(pickle.dumps(result))


@contextlib.contextmanager
def _group(url: str, rank: int, size: int, local_rank: int) -> Iterator[Any]:
    """The default group, over NCCL too if every rank has its own device; gives a gloo group for small values."""
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=url,
            rank=rank,
            world_size=size,
            timeout=GROUP_TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} of {size} cannot join the others: {error}") from None
    try:
        yield dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if cuda else dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"another rank is gone while measuring; see its message. From torch: {error}") from None
