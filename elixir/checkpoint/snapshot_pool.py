"""Host memory for copies of what a checkpoint has not written yet when it is about to change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 64
"""Alignment of every area and of every tensor in one: a cache line, and a multiple of every element."""


def aligned(nbytes: int) -> int:
    """Bytes that something takes in an area."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Area:
    """A range of the pool that is in use."""

    start: int
    memory: torch.Tensor


class SnapshotPool:
    """Areas of one buffer, which is made when the first is taken.

    Args:
        limit_bytes: size of the buffer; 0 is a pool that has no room, so that updates wait for the disk.
        make: makes it.
    """

    def __init__(self, limit_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        self.limit_bytes = limit_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._make, self._memory = make, torch.empty(0, dtype=torch.uint8, device="cpu")
        self._free = [(0, self.limit_bytes)] if self.limit_bytes else []
        self._lock = threading.Lock()
        self.piece: torch.Tensor | None = None
        """Pinned memory through which the writer of a save reads a device. The next save uses it again, because pinning
        and freeing make the driver wait for the device."""
        self.largest_use_bytes = 0
        """Largest number of bytes in use at once."""

    @property
    def is_made(self) -> bool:
        """Whether the buffer is there."""
        return bool(self._memory.numel())

    @property
    def free_bytes(self) -> int:
        """Bytes that are free."""
        with self._lock:
            return sum(nbytes for _, nbytes in self._free)

    def take(self, nbytes: int) -> Area | None:
        """Takes an area of `nbytes`; None if it does not fit now."""
        wanted = aligned(nbytes)
        with self._lock:
            for i, (start, free) in enumerate(self._free):
                if free < wanted:
                    continue
                self._free[i : i + 1] = [(start + wanted, free - wanted)] if free > wanted else []
                if not self._memory.numel():
                    self._memory = self._make(self.limit_bytes)
                in_use = self.limit_bytes - sum(left for _, left in self._free)
                self.largest_use_bytes = max(self.largest_use_bytes, in_use)
                return Area(start, self._memory[start : start + nbytes])
            return None

    def give_back(self, area: Area) -> None:
        """Frees an area."""
        if not area.memory.numel():
            return  # it would part the areas on both sides of it
        with self._lock:
            self._free.append((area.start, aligned(area.memory.numel())))
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for start, nbytes in self._free:
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
                else:
                    merged.append((start, nbytes))
            self._free = merged
