"""Python's garbage collection, held off while much is made that is not garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """While open, nothing looks for cycles: each look goes through all objects of the process, in vain, and would free
    cycles of others at random moments."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
