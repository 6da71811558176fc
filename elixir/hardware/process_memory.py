"""Host memory of a process apart from what a plan counts: Python, libraries, and what the user's program has loaded.

`resident` measures it. The constants estimate it where nothing runs yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from elixir.units import LARGEST_BYTES, MIB

STATUS = Path("/proc/self/status")
_PAGES = "/proc/self/statm"
_M_ARENA_MAX = -8  # of glibc's malloc.h
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_FIELDS = ("RssAnon", "RssFile", "RssShmem", "VmHWM")
MAPS_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
"""Environment variable with which glibc maps tensors of so many bytes one by one, and gives them back when they are
freed. Without it glibc learns to keep up to 32 MiB of each in its heap, where they leave gaps."""
HEAP_BYTES, HEAP_SHARE, HEAP_OF_RANKS = 30 * MIB, 0.57, 0.17
"""These gaps at the peak of a step on a CPU: what is always there, and a share of the activations that are freed by
then; on several ranks instead a share of the plan's memory, since gradients and collectives pass through the heap.

Source: measured with torch 2.13.0+cpu and glibc 2.36 on x86-64. 2 to 63 MiB with little freed; 62 to 91 MiB with 59 to
118 MiB freed; on two ranks 0.15, 0.17 and 0.19. `HEAP` holds a process to them."""
HEAP_LEFT_BYTES = 12 * MIB
"""The part of them that stays where memory is given back before a full state dict is made, with new gaps.

Source: `benchmark/results/contract.csv`, runs with one rank that save one: 6, 7, 9, 11, 20 and 37 MB above a prediction
without it."""
MAPPED_BYTES = 32 * MIB
"""A tensor of more bytes never lies in the heap: glibc maps it, and gives it back when it is freed."""
HEAP_LOOK_SHARE = 0.015
"""Memory is given back at this share below the expected peak, since gradients come in large pieces.

Source: with 0.02 the peaks of 41 runs in `benchmark/results/contract.csv` lay 0.95 % below what was expected."""
LOOKS_APART_S = 3e-4
"""No look is needed so soon after the last, since a process gets few pages meanwhile.

Source: two threads filled 0.3 MiB of new memory in a third of it. A look takes 6 us, which is as long as a fifth of a
use of a small weight."""


@dataclass(frozen=True)
class Resident:
    """Resident memory of this process as Linux counts it, in bytes."""

    own_bytes: int
    """Pages that no file has: the heap, tensors, shared memory."""
    file_bytes: int
    """Pages of files, which the processes of a machine share, and which the kernel can drop."""
    peak_bytes: int
    """The most that both were together."""


HELD = {"cpu": Resident(290 * MIB, 115 * MIB, 405 * MIB), "cuda": Resident(1280 * MIB, 768 * MIB, 2048 * MIB)}
"""Memory that a process holds before its model is wrapped, by kind of device.

Source: on a CPU measured as above, with the search in the same process. With CUDA an estimate: 2.0 GiB resident with a
context in pytorch/pytorch#113326, 2.2 in #106511, 0.4 if kernels are loaded lazily; the parts are a guess."""
FIRST_USE = {"cpu": Resident(6 * MIB, 6 * MIB, 12 * MIB), "cuda": Resident(256 * MIB, 256 * MIB, 512 * MIB)}
"""Memory that libraries take when they are first used, after a model was wrapped.

Source: on a CPU measured as above, with a model of 2 x 64; with CUDA an estimate."""


def resident(status: Path = STATUS) -> Resident | None:
    """Reads it; None where the operating system does not tell."""
    try:
        lines = [line.partition(":") for line in status.read_text().splitlines()]
    except OSError:
        return None
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in lines if name in _FIELDS}
    if len(found) < len(_FIELDS):
        return None
    return Resident(found["RssAnon"] + found["RssShmem"], found["RssFile"], found["VmHWM"])


def give_back_freed() -> None:
    """Returns memory that is freed, and that glibc keeps, to the operating system; does nothing with another C library.

    It takes milliseconds, and pages are made again when they are next used. So it is for rare moments, before much
    memory is taken for something else.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeapLimit:
    """Gives freed memory back when this process has more private memory than it is expected to.

    A freed gradient leaves a gap in the heap into which the next one of its size does not fit: glibc 2.36 looks for 96
    bytes more than it then takes, to align a tensor. So all gradients of a backward may leave gaps. Pages that are made
    anew for the next tensors take as long as a copy, so nothing is given back below the limit.

    Source of its cost: 1.06 times the CPU seconds of a step with homes on the host and 256 tokens, 1.16 with 16 tokens.
    """

    def __init__(self) -> None:
        self._file: io.FileIO | None = None
        self.expected_bytes = 0
        """The expected peak of `Resident.own_bytes`; 0 for none."""
        self._limit_bytes = self._next_bytes = LARGEST_BYTES
        self._unseen_bytes = self._room_bytes = 0
        self._looks_at_s = 0.0  # the earliest time of the next look
        self._lasting_bytes: int | None = None
        """Held by the last forward that began by giving back: no freed memory is among them. None before."""
        self._believes, self._uses_again = False, True

    def set(self, expected_bytes: int, unseen_bytes: int = 0, room_bytes: int = 0) -> None:
        """Expects a peak of `Resident.own_bytes` from here on.

        Args:
            expected_bytes: the peak.
            unseen_bytes: that may be taken between two looks, such as the gradient of a large weight.
            room_bytes: the part of it for freed memory that stays in the heap and is used again.
        """
        self._unseen_bytes, self._room_bytes = unseen_bytes, room_bytes
        if self._file is None:
            with contextlib.suppress(OSError):
                self._file = open(_PAGES, "rb", buffering=0)  # noqa: SIM115 - for as long as it is looked at
                weakref.finalize(self, self._file.close)
        if expected_bytes != self.expected_bytes:  # another plan's tensors may be smaller
            self._uses_again = True
        held, self.expected_bytes = resident(), expected_bytes
        shared_bytes = 0 if held is None else held.own_bytes - self.held_bytes()
        limit_bytes = int((1 - HEAP_LOOK_SHARE) * expected_bytes) - max(shared_bytes, 0)
        self._limit_bytes = self._next_bytes = max(limit_bytes, 0)
        self._looks_at_s = 0.0

    def trim_if_over(self, coming_bytes: int = 0) -> None:
        """Gives back if the limit is exceeded; what is still held then may grow by a share before the next time.

        Args:
            coming_bytes: that are taken before the next look, such as the activations of a forward.
        """
        if self._file is None:
            return
        if not coming_bytes:
            now_s = time.perf_counter()
            if now_s < self._looks_at_s:
                return
            self._looks_at_s = now_s + LOOKS_APART_S
        coming_bytes = max(coming_bytes, self._unseen_bytes)
        if self.held_bytes() + coming_bytes > self._next_bytes:
            give_back_freed()
            if self._believes:
                self._believes = self._uses_again = False
            least = self.held_bytes() + coming_bytes + int(HEAP_LOOK_SHARE * self._limit_bytes)
            self._next_bytes = max(self._limit_bytes, least)

    def forward_begins(self, coming_bytes: int) -> None:
        """Gives back as `trim_if_over` does; with room, what comes takes the freed memory that the heap has kept first.

        Should more be held in the same step than is expected, it does not, such as tensors of more than `MAPPED_BYTES`,
        and this is not supposed again.
        """
        self._believes, held_bytes = False, self.held_bytes()
        if self._room_bytes and self._uses_again and self._lasting_bytes is not None:
            again_bytes = min(max(held_bytes - self._lasting_bytes, 0), coming_bytes)
            self.trim_if_over(coming_bytes - again_bytes)
            self._believes = again_bytes > 0
            return
        self.trim_if_over(coming_bytes)
        if self._room_bytes and self.held_bytes() < held_bytes:  # it has given back
            self._lasting_bytes = self.held_bytes()

    def forget(self) -> None:
        """Expects nothing any more: no plan runs on a CPU, or this is a forked process."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file, self.expected_bytes = None, 0

    def held_bytes(self) -> int:
        """Private memory: `Resident.own_bytes` less what other processes share; 0 if it is not known."""
        try:
            if self._file is not None:
                _, resident_pages, shared_pages, *_ = os.pread(self._file.fileno(), 128, 0).split()
                return (int(resident_pages) - int(shared_pages)) * PAGE_BYTES
        except (OSError, ValueError):  # the program has closed all files
            self.forget()
        return 0


HEAP = HeapLimit()
"""The limit of this process, whose heap all models share. It is looked at where memory is taken: before forwards and
fetches, for gradients, between updates and their pieces. It has a limit once the peak of a process with a CPU is
predicted."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=HEAP.forget)


def share_heap() -> None:
    """Has threads that start from now on allocate from the heap of the first one (glibc; nothing elsewhere).

    Each thread would otherwise keep what it has freed in a separate heap, where no other can use it. On two ranks
    with a CPU, whose lanes copy chunks, that was 120 of 220 MiB above a prediction of 1,040.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and hasattr(ctypes.CDLL(None), "malloc_trim"):
        set_option(_M_ARENA_MAX, 1)


def estimated_bytes(kind: str, ranks: int, *, running: bool = False) -> int:
    """Bytes of one machine for so many processes, without their plan; pages of files count once.

    Args:
        kind: of the devices, ``cuda`` or ``cpu``.
        ranks: processes.
        running: only what they take after their models were wrapped.
    """
    parts = (FIRST_USE[kind],) if running else (HELD[kind], FIRST_USE[kind])
    return sum(ranks * part.own_bytes + part.file_bytes for part in parts)
