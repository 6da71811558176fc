"""Host memory that the runtime keeps for itself: exact sizes, pinned where a device copies from it, never shared by
`fork`."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys

import torch

from elixir.errors import StateError

HUGE_PAGE_BYTES = 2 << 20
"""A huge page on x86-64, and on arm64 with pages of 4 KiB; smaller buffers cannot hold one."""
PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every CUDA context of the process, not only that of one device."""


def pinned_zeros(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """A flat buffer of bytes, all zero, whose pinning ends with the last tensor that lies in it.

    PyTorch's own allocator of pinned memory rounds up to powers of two; registering memory with the driver does not.
    The pages are those of `host_zeros`.

    Args:
        nbytes: at least 1.
        device: a CUDA device, whose context pins; None: the calling thread's current one.

    Raises:
        StateError: the driver does not pin so much.
    """
    memory, buffer = _touched(nbytes)
    memory.pin(buffer.data_ptr(), device)
    return buffer


def host_zeros(numel: int, dtype: torch.dtype = torch.uint8, *, forked: bool = False) -> torch.Tensor:
    """A flat buffer, all zero, in pages that are present and that no child process gets, unless it is `forked`.

    A child that `fork` makes, such as a worker of a DataLoader, has nothing at these addresses: should it read a tensor
    that lies there, the operating system ends it. Otherwise either the kernel would copy every pinned page inside
    `fork`, or each page would be copied when it is next written to while the child lives.

    The calling thread and its OpenMP threads touch the pages first, so they lie on the NUMA node of these threads.

    Args:
        numel: its elements; of none it is an ordinary tensor.
        dtype: of each.
        forked: child processes get it.
    """
    if not numel:
        return torch.zeros(0, dtype=dtype, device="cpu")
    return _touched(numel * dtype.itemsize, forked=forked)[1].view(dtype)


def separate_copy(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in host memory. A large one has separate pages, which are gone when it is freed: the C library would keep
    them, or leave gaps between what it has freed before."""
    nbytes = source.numel() * dtype.itemsize
    if nbytes < HUGE_PAGE_BYTES or os.name != "posix" or not source.is_contiguous():
        return source.to("cpu", dtype, copy=True)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(source.shape).copy_(source)


def _touched(nbytes: int, *, forked: bool = False) -> tuple[_Pages, torch.Tensor]:
    memory = _Pages(nbytes, forked=forked)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    buffer.zero_()  # by all threads: the driver would bring the pages in one after the other
    return memory, buffer


class _Pages(mmap.mmap):
    """Memory in separate pages: two registered ranges must not share a page.

    Freeing memory that is still registered makes the driver refuse the same addresses to the next one. So what pins
    it is what owns it.
    """

    _address = 0
    _pinned_by = 0

    def __new__(cls, nbytes: int, *, forked: bool = False) -> _Pages:
        if os.name != "posix":
            return super().__new__(cls, -1, nbytes)
        pages = super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if not forked:
            pages._advise("MADV_DONTFORK")
        if nbytes >= HUGE_PAGE_BYTES:
            pages._advise("MADV_HUGEPAGE")  # before the first touch, which then brings in 512 small pages at once
        return pages

    def _advise(self, name: str) -> None:
        """Tells the kernel, where it has such an advice at all; none of them changes what a buffer holds."""
        advice = getattr(mmap, name, None)
        if advice is not None:
            with contextlib.suppress(OSError):  # a kernel that was built without huge pages
                self.madvise(advice)

    def pin(self, address: int, device: torch.device | None) -> None:
        with torch.cuda.device(device):  # else the driver makes a context on device 0, whatever device is used
            status = torch.cuda.cudart().cudaHostRegister(address, len(self), PORTABLE)
            if int(status) != 0:
                _forget_last_error()
                raise StateError(
                    f"pinning {len(self)} bytes of host memory failed with CUDA error {int(status)}: is so much free, "
                    "and may this process lock it (ulimit -l)?"
                )
        self._address, self._pinned_by = address, os.getpid()

    def __del__(self) -> None:
        # Called before the pages are given back, on whichever thread lets go last; the driver waits for what is under
        # way. A child that `fork` made has a copy of this object, and neither the pages nor a driver.
        if self._address and self._pinned_by == os.getpid() and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._address)


def _forget_last_error() -> None:
    """The runtime keeps a call's error until somebody asks for it: the next kernel launch would, and raise in its
    place."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
