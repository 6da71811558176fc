"""Peak resident memory of a stretch of code, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Growth:
    """The largest growth of resident memory."""

    peak_bytes: int = 0


@contextmanager
def resident_growth() -> Iterator[Growth]:
    """Sets `peak_bytes` when the stretch is over; skips the test where the kernel does not let a peak be reset."""
    growth = Growth()
    gc.unfreeze()  # a rank maps the pages of libraries in which objects are now, not while it is measured
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of resident memory cannot be reset here")
    before = status_bytes("VmRSS")
    yield growth
    growth.peak_bytes = status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """A field of this process's status, such as ``VmRSS``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")
