"""Runs a function on several ranks: processes joined by gloo over a file, with a timeout, no port, and nothing left.

Ranks are forked from a server that has imported what is slow to import and has run nothing, so a rank starts in a
fraction of a second and in a clean process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

_PRELOAD = ["tests.common.uncollected", "torch", "torch.distributed", "tests.common.ddp"]
GROUP_TIMEOUT_S = 60.0
"""Timeout of collectives, unless a test asks for another."""
WAIT_S = 120.0
"""How long a whole run may take."""
USED_S = [0.0]
"""Processor seconds of all ranks so far that have answered. They are children of the server: `resource` of this process
does not have them."""
ALONE: dict[str, float] = {"group_timeout_s": 24 * 3600.0, "wait_s": 900.0}
"""Seconds for ranks that must end because they learn of something: no collective ends by its timeout. A rank that waits for ever
has the error `no answer`, and a slow machine changes nothing."""


@dataclass
class Outcome:
    """The outcome of one rank."""

    rank: int
    result: Any = None
    error: str | None = None
    """Traceback of what the function raised, or a word on how the process ended without an answer."""
    seconds: float = 0.0
    """Seconds from the start of the run to the rank's answer."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """``function(rank, world_size, *args)`` on every rank; what each returned, in order of rank.

    Raises:
        AssertionError: a rank raised or ended early; carries the traceback of the first one that did.
    """
    outcomes = run_to_end(world_size, function, *args, **options)
    failed = sorted((o for o in outcomes if o.error is not None), key=lambda outcome: outcome.seconds)
    if failed:
        others = "".join(f"\n--- rank {o.rank}: {str(o.error).strip().splitlines()[-1]}" for o in failed[1:])
        raise AssertionError(f"rank {failed[0].rank} of {world_size} failed:\n{failed[0].error}{others}")
    return [outcome.result for outcome in outcomes]


def on_each_rank(world_size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of what each rank does, ``test(rank, world_size, *parameters)``: pytest gives the parameters, and so
    many ranks run it. Options are those of `run_ranks`."""

    def made(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**given: Any) -> None:
            run_ranks(world_size, _Wrapped(test), *(given[name] for name in names), **options)

        signature = inspect.signature(function)
        names = list(signature.parameters)[2:]
        parameters = [signature.parameters[name] for name in names]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test

    return made


@dataclass
class _Wrapped:
    """The function inside of a test, which pickle finds by the test's name."""

    test: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        self.test.__wrapped__(*args)  # type: ignore[attr-defined]


def as_launched(rank: int, world_size: int) -> None:
    """The environment that torchrun gives; the group is there already."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def run_to_end(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    wait_s: float = WAIT_S,
) -> list[Outcome]:
    """Runs ranks that are expected to fail: waits for all of them, and raises nothing; otherwise as `run_ranks`."""
    context = _forkserver()
    with tempfile.TemporaryDirectory(prefix="elixir-ranks-") as folder, _safe_to_fork():
        processes: list[BaseProcess] = []
        answers: list[multiprocessing.connection.Connection] = []
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        started = time.perf_counter()
        try:
            for rank in range(world_size):
                mine, theirs = context.Pipe(duplex=False)
                job = (rank, world_size, os.path.join(folder, "store"), group_timeout_s, theirs, test, function, args)
                process = context.Process(target=_rank_main, args=job, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                answers.append(mine)
            return _collect(answers, started, wait_s)
        finally:
            for process, answer in zip(processes, answers, strict=True):
                answer.close()
                process.join(timeout=5.0)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


def _forkserver() -> ForkServerContext:
    """The server that forks ranks. Its use raises an audit event, by which `tests.common.stages` knows such tests."""
    sys.audit("multiprocessing.Process")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


@contextlib.contextmanager
def child(
    function: Callable[..., Any], *args: Any
) -> Iterator[tuple[BaseProcess, multiprocessing.connection.Connection]]:
    """A process that runs ``function(say, *args)``, to be killed; and what it says by ``say.send``. It is gone
    afterwards."""
    context = _forkserver()
    with _safe_to_fork():
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child_main, args=(theirs, function, args), daemon=True)
        process.start()
        theirs.close()
        try:
            yield process, mine
        finally:
            process.kill()
            process.join()
            process.close()
            mine.close()


def _child_main(
    say: multiprocessing.connection.Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    _collect_what_is_new()
    torch.set_num_threads(1)
    function(say, *args)


def _collect_what_is_new() -> None:
    """Leaves out what was imported before the fork: looking through it takes longer than most ranks do."""
    gc.freeze()
    gc.enable()


def said(hear: multiprocessing.connection.Connection) -> Iterator[Any]:
    """All that a process that is gone has said."""
    with contextlib.suppress(EOFError):
        while True:
            yield hear.recv()


def _collect(answers: list[multiprocessing.connection.Connection], started: float, wait_s: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(answers):
        waiting = [answer for rank, answer in enumerate(answers) if rank not in outcomes]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, started + wait_s - time.perf_counter()))
        for answer in ready:
            rank = answers.index(answer)  # type: ignore[arg-type]
            try:
                result, error, used_s = answers[rank].recv()
                USED_S[0] += used_s
            except EOFError:
                result, error = None, "the process ended without an answer"
            outcomes[rank] = Outcome(rank, result, error, time.perf_counter() - started)
        if not ready:
            for rank in range(len(answers)):
                outcomes.setdefault(rank, Outcome(rank, None, f"no answer within {wait_s:g} s", wait_s))
    return [outcomes[rank] for rank in range(len(answers))]


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    group_timeout_s: float,
    answer: multiprocessing.connection.Connection,
    test: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["PYTEST_CURRENT_TEST"] = test  # the server has the one that started it
    _collect_what_is_new()
    torch.set_num_threads(1)
    # Ranks stand for separate machines; what one draws must not depend on another.
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout_s),
    )
    try:
        result = function(rank, world_size, *args)
        answer.send((result, None, time.process_time()))
    except BaseException:
        answer.send((None, traceback.format_exc(), time.process_time()))
        # As a program whose main raised: gone at once, without a goodbye to the others.
        answer.close()
        os._exit(1)
    dist.destroy_process_group()


@contextlib.contextmanager
def _safe_to_fork() -> Any:
    """Ranks share two cores: one thread each, also in libraries that read the environment when they are loaded. Modules
    may ask whether there is a GPU without a CUDA context, which could not be used after the fork."""
    given = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    before = {name: os.environ[name] for name in given if name in os.environ}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]
        os.environ.update(before)
