"""OpenMP threads and cores of one thread, whatever those of the process are."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

logger = logging.getLogger(__name__)


def use_threads(count: int, cores: Sequence[int] | None = None) -> None:
    """The calling thread's operators run on `count` threads from here on; those of other threads as before.

    ``torch.set_num_threads`` sets OpenMP's number for the thread that calls it, and also a default, which each
    other thread takes over with its first operator: compute must not, nor threads that the user starts later. So the
    default is put back, which only another thread can do without losing the number set here. A thread that begins its
    first operator within these microseconds takes over `count`.

    Args:
        count: of threads, the calling one included.
        cores: those that it and the threads it starts may use; None leaves them. OpenMP threads that run
            already stay where they are, so call this first.
    """
    if cores is not None:
        try:
            os.sched_setaffinity(0, cores)  # 0 is the calling thread, not the process
        except OSError as error:  # such as a core that was taken offline
            logger.warning("the host's Adam runs on any core: binding it to cores %s failed: %s", list(cores), error)
    torch.get_num_threads()  # now it takes over the default, and not later, instead of the number set here
    default = _on_another_thread(torch.get_num_threads)
    torch.set_num_threads(count)
    _on_another_thread(partial(torch.set_num_threads, default))


def _on_another_thread(work: Callable[[], int | None]) -> int:
    answers: list[int | None] = []
    thread = threading.Thread(target=lambda: answers.append(work()), name="elixir threads")
    thread.start()
    thread.join()
    return answers[0] or 0
