"""Works on several parts of a question side by side, in forked processes that share what this one has imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from elixir.errors import StateError
from elixir.hardware.host_share import host_view

Part = TypeVar("Part")
Found = TypeVar("Found")


def process_count() -> int:
    """The number of processes that can work side by side: one for each core, one in all where a fork is not safe."""
    here = host_view()
    return max(1, int(min(len(here.cores), here.quota_cores))) if sys.platform == "linux" else 1


def side_by_side(work: Callable[[Part], Iterable[Found]], parts: Sequence[Part], processes: int = 1) -> Iterator[Found]:
    """Gives all that `work` gives for each part as it comes: in order within a part, and part by part with one process.

    Args:
        work: done for each part. An error that it raises is raised here.
        parts: the parts.
        processes: that run at a time. More than one only where neither CUDA nor a backward has run before: neither is
            there after a fork.
    """
    if processes == 1:
        for part in parts:
            yield from work(part)
        return
    fork = multiprocessing.get_context("fork")
    waiting, running = list(parts), dict[Connection, BaseProcess]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                here, there = fork.Pipe(duplex=False)
                running[here] = fork.Process(target=_send, args=(work, waiting.pop(0), there), daemon=True)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of other threads: `_send` needs none of them
                    running[here].start()
                there.close()
            for here in [each for each in wait(list(running)) if isinstance(each, Connection)]:
                try:
                    found, error, ended = here.recv()
                except EOFError:
                    running[here].join()
                    raise StateError(f"a process that plans has ended with {running[here].exitcode}") from None
                if error is not None:
                    raise error
                if ended:
                    running.pop(here).join()
                else:
                    yield found
    finally:
        for process in running.values():
            process.terminate()


def _send(work: Callable[[Part], Iterable[Found]], part: Part, there: Connection) -> None:
    """Sends what `work` gives, an error of it, and that it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the first one ends the others
    torch.set_num_threads(1)  # OpenMP's threads are not there after a fork
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd would start a thread for each device
    try:
        for found in work(part):
            there.send((found, None, False))
        there.send((None, None, True))
    except Exception as error:
        there.send((None, error, True))
