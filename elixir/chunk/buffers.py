"""Memory that chunks live in, and the count of it.

Every buffer of the runtime is made by an `Arena`, so what was taken can be compared with what the plan predicted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch

from elixir.access.placeholders import marked, storage_of, unmarked
from elixir.chunk.pinned import host_zeros, pinned_zeros
from elixir.errors import NoMemoryError, StateError, readable_bytes
from elixir.plan.chunk_plan import Memory

Kept: TypeAlias = "Memory | Literal['disk']"
"""Where bytes are counted: memory, and files."""


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
        self._lock = threading.Lock()  # the lane of the host's Adam counts states while backward counts gradients

    def make(
        self, numel: int, dtype: torch.dtype, home: Memory, kind: str, *, pin: bool = True, paged: bool = False
    ) -> torch.Tensor:
        """A flat zeroed buffer of exactly `numel` elements.

        Host memory next to a CUDA device is in pages that no child process gets. It is pinned, unless `pin` says that
        nothing is copied between it and the device. With `paged` host memory begins at a page, whatever the device.

        Raises:
            NoMemoryError: there is not so much memory; torch's own error for that of a CUDA device.
        """
        try:
            buffer = self._made(numel, dtype, home, pin=pin, paged=paged)
        except torch.OutOfMemoryError:
            raise  # programs that look for the largest batch know the one of CUDA
        except (
            RuntimeError,
            MemoryError,
            OverflowError,
            OSError,
            TypeError,
            ValueError,
        ) as error:  # as each allocator has it
            raise NoMemoryError(
                f"there is no room for {readable_bytes(numel * dtype.itemsize, up=True)} of {kind.replace('_', ' ')} "
                f"in {home} memory ({error}); plan for less with {home}_memory=, or free some"
            ) from error
        self.count(buffer.nbytes, home, kind)
        return buffer

    def _made(self, numel: int, dtype: torch.dtype, home: Memory, *, pin: bool, paged: bool) -> torch.Tensor:
        if home == "host" and self.device.type == "cuda" and numel:
            memory: Callable[[int], torch.Tensor] = partial(pinned_zeros, device=self.device) if pin else host_zeros
            return memory(numel * dtype.itemsize).view(dtype)
        if home == "host" and paged:
            return host_zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device if home == "device" else "cpu")

    def count(self, nbytes: int, home: Kept, kind: str) -> None:
        """So many more bytes (fewer, if negative) are in use."""
        with self._lock:
            live = self._live[home]
            live[kind] += nbytes
            if live[kind] < 0:
                raise StateError(f"{kind} on the {home}: {-live[kind]} bytes more were freed than were ever taken")
            self.peak_bytes[home] = max(self.peak_bytes[home], sum(live.values()))

    def live_bytes(self, home: Kept) -> int:
        """Bytes in use now."""
        with self._lock:
            return sum(self._live[home].values())

    def parts(self, home: Kept) -> dict[str, int]:
        """Bytes in use now, by kind."""
        with self._lock:
            return {kind: nbytes for kind, nbytes in sorted(self._live[home].items()) if nbytes}


class BlockPool:
    """rCache: `count` blocks of one size in one storage, so that a tensor's storage tells whether it lies in a block.

    Args:
        arena: makes the memory.
        count: number of blocks.
        block_bytes: size of one.
        poison: fill what leaves a block with NaN, so that a stale use cannot go unnoticed; for tests.
    """

    def __init__(self, arena: Arena, count: int, block_bytes: int, *, poison: bool = False) -> None:
        self.block_bytes = block_bytes
        self.count = count
        self._poison = poison
        self._memory = arena.make(count * block_bytes, torch.uint8, "device", "rcache")
        self._marked = marked(self._memory)
        self._free = list(range(count - 1, -1, -1))
        self._storage = self._memory.untyped_storage()._cdata if count else -1

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def take(self) -> int:
        """Index of a free block, which is now taken."""
        if not self._free:
            raise StateError(f"all {self.count} rCache blocks are taken")
        return self._free.pop()

    def give_back(self, block: int) -> None:
        """The block holds nothing any more."""
        if self._poison:
            self._memory[block * self.block_bytes : (block + 1) * self.block_bytes].fill_(0xFF)  # NaN in every dtype
        self._free.append(block)

    def view(self, block: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of a block."""
        start = block * self.block_bytes
        return self._memory[start : start + numel * dtype.itemsize].view(dtype)

    def marked_view(self, block: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same, marked (`elixir.access.placeholders`)."""
        start = block * self.block_bytes
        with unmarked():
            return self._marked[start : start + numel * dtype.itemsize].view(dtype)

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(block, offset in elements inside it) of a tensor that lies in the pool, else None."""
        if storage_of(tensor) != self._storage:
            return None
        block, offset = divmod(int(tensor.storage_offset()) * tensor.itemsize, self.block_bytes)
        return block, offset // tensor.itemsize
