"""Host memory that a CUDA device reads and writes by itself, pinned at its exact size for as long as it lives."""

from __future__ import annotations

import mmap
import os
import sys

import torch

from elixir.errors import StateError


def pinned_zeros(nbytes: int) -> torch.Tensor:
    """A flat buffer of bytes, all zero, whose pinning ends with the last tensor that lies in it.

    PyTorch's own allocator of pinned memory rounds up to powers of two; registering memory with the driver does not.

    Args:
        nbytes: at least 1.

    Raises:
        StateError: the driver does not pin so much.
    """
    memory = _Pages(nbytes)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    buffer.zero_()  # by all threads: the driver alone would bring the pages in one after the other
    memory.pin(buffer.data_ptr())
    return buffer


class _Pages(mmap.mmap):
    """Memory in pages of its own: two registered stretches must not share one.

    Whoever frees memory that is still registered makes the driver refuse the same addresses to the next one. So what pins
    it is what owns it.
    """

    _address = 0

    def __new__(cls, nbytes: int) -> _Pages:
        if os.name == "posix":
            return super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return super().__new__(cls, -1, nbytes)

    def pin(self, address: int) -> None:
        status = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)
        if int(status) != 0:
            raise StateError(
                f"pinning {len(self)} bytes of host memory failed with CUDA error {int(status)}: is so much free, and may "
                "this process lock it (ulimit -l)?"
            )
        self._address = address

    def __del__(self) -> None:
        # Called before the pages are given back, on whichever thread lets go last; the driver waits for what is under way.
        if self._address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._address)
