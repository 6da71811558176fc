"""`Arena`: makes the memory that chunks live in, and counts it.

Every buffer of the runtime is made by an `Arena`, so what was taken can be compared with what the plan predicted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch

from elixir.chunk.memory import Memory
from elixir.chunk.pages import HUGE_PAGE_BYTES, host_zeros, pinned_zeros
from elixir.errors import NoMemoryError, StateError, readable_bytes
from elixir.hardware.process_memory import HEAP
from elixir.plan.chunk_plan import MemoryHome

Kept: TypeAlias = "MemoryHome | Literal['disk']"
"""Places where bytes are counted: memory, and files."""


class Arena:
    """Makes buffers on the device and on the host, and counts their bytes by what they are for.

    Args:
        device: where compute runs. With ``cpu``, both homes are host memory, and "device bytes" are what is counted
            for the device here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._live: dict[Kept, Counter[str]] = {"device": Counter(), "host": Counter(), "disk": Counter()}
        self.peak_bytes: dict[Kept, int] = {"device": 0, "host": 0, "disk": 0}
        self.most_bytes: Counter[str] = Counter()
        """The most bytes of each kind on the host."""
        self.given_bytes: Counter[str] = Counter()
        """Bytes of the largest state dicts that callers got, which are theirs, by what they are of."""
        self._lock = threading.Lock()  # the lane of the host's Adam counts states while backward counts gradients

    def make(
        self,
        numel: int,
        dtype: torch.dtype,
        home: MemoryHome,
        kind: str,
        *,
        pin: bool = True,
        paged: bool = False,
        passing: bool = False,
    ) -> Memory:
        """Makes a flat zeroed buffer of exactly `numel` elements.

        Host memory next to a CUDA device is in pages that no child process gets. It is pinned, unless `pin` says that
        nothing is copied between it and the device. With `paged` host memory begins at a page, whatever the device. So
        do large buffers on a CPU, unless they are `passing`, so freed in each step: the C library leaves gaps between.

        Raises:
            NoMemoryError: host memory ran out. On a CUDA device, torch's own error is raised.
        """
        HEAP.trim_if_over(numel * dtype.itemsize)
        try:
            buffer = self._made(numel, dtype, home, pin=pin, paged=paged, passing=passing)
        except torch.OutOfMemoryError:
            raise  # programs that look for the largest batch know the one of CUDA
        except (RuntimeError, MemoryError, OverflowError, OSError, TypeError, ValueError) as error:  # of any allocator
            raise NoMemoryError(
                f"there is no room for {readable_bytes(numel * dtype.itemsize, up=True)} of {kind.replace('_', ' ')} "
                f"in {home} memory ({error}); plan for less with {home}_memory=, or free some"
            ) from error
        return Memory(buffer, self.count, home, kind)

    def _made(
        self, numel: int, dtype: torch.dtype, home: MemoryHome, *, pin: bool, paged: bool, passing: bool
    ) -> torch.Tensor:
        if home == "host" and self.device.type == "cuda" and numel:
            memory: Callable[[int], torch.Tensor] = partial(pinned_zeros, device=self.device) if pin else host_zeros
            return memory(numel * dtype.itemsize).view(dtype)
        if home == "host" and paged:
            return host_zeros(numel, dtype)
        if self.device.type == "cpu" and not passing and numel * dtype.itemsize >= HUGE_PAGE_BYTES:
            return host_zeros(numel, dtype, forked=True)
        return torch.zeros(numel, dtype=dtype, device=self.device if home == "device" else "cpu")

    def count(self, nbytes: int, home: Kept, kind: str) -> None:
        """Counts `nbytes` more bytes in use; fewer if it is negative."""
        with self._lock:
            live = self._live[home]
            live[kind] += nbytes
            if live[kind] < 0:
                raise StateError(f"{kind} on the {home}: {-live[kind]} bytes more were freed than were ever taken")
            self.peak_bytes[home] = max(self.peak_bytes[home], sum(live.values()))
            if home == "host":
                self.most_bytes[kind] = max(self.most_bytes[kind], live[kind])

    def live_bytes(self, home: Kept) -> int:
        """Bytes in use now."""
        with self._lock:
            return sum(self._live[home].values())

    def parts(self, home: Kept) -> dict[str, int]:
        """Bytes in use now, by kind."""
        with self._lock:
            return {kind: nbytes for kind, nbytes in sorted(self._live[home].items()) if nbytes}
