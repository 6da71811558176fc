"""Ties a process to the one that started it, and to a time.

    python benchmark/proof/lifetime.py PARENT SECONDS COMMAND...     # COMMAND, ended after SECONDS, and with process PARENT

A worker of the proof holds a GPU and may have pinned a hundred gigabytes. If its parent is killed, nobody is left to end
it, and every later command finds the machine full. The kernel therefore kills the worker when its parent goes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
"""The number in ``linux/prctl.h``."""


def end_with_parent(still_there: Callable[[], bool], number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to send this process `number` when the thread that started it ends. Linux only; elsewhere nothing happens.

    Note the word *thread*: a parent has to start its children on a thread that lives as long as they may.

    Args:
        still_there: whether the parent lives. It is asked after the kernel was told, since a parent that ended before that
            is no longer reported; then this process ends at once.
        number: SIGKILL ends a process even while it is inside of a driver's call or of code that never returns to Python.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(int(number)), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if not still_there():
        os._exit(128 + number)


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """`end_with_parent` for a child that knows the process id of its parent."""
    end_with_parent(lambda: os.getppid() == parent, number)


def main(given: list[str]) -> int:
    """Become a command that ends after a time and with its parent: both survive `exec`."""
    numbers = [int(text) for text in given[:2] if text.isdecimal()]
    if len(numbers) < 2 or 0 in numbers or len(given) < 3:
        print("usage: lifetime.py PARENT SECONDS COMMAND..., with whole numbers above 0", file=sys.stderr)
        return 2
    parent, seconds = numbers
    end_with(parent, signal.SIGTERM)
    signal.alarm(seconds)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell has what it starts in the background ignore interrupts
    os.execvp(given[2], given[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
