"""How fast a disk reads and writes, past the page cache: what optimizer states that live there would be moved at."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elixir.errors import InputError
from elixir.files import DIRECT_BYTES, FILES, File, aligned_buffer, file_system, unnamed_file, warn_if_in_memory
from elixir.microbench.fitting import Job, Series, geometric, sweep
from elixir.microbench.measurement import Bench
from elixir.units import MIB, format_bytes

FILE_BYTES = {False: 512 * MIB, True: 32 * MIB}
"""Size of the one file, by whether it is quick. Each amount walks through all of it, so that no drive's cache
answers."""
LARGEST_SHARE = 4
"""The largest amount is this part of the file."""
SMALLEST_BYTES = MIB // 4
REQUEST_BYTES = 8 * MIB
"""Bytes of one call; the kernel cuts it into requests of the drive."""
LONGEST_S = 1.0
"""No amount that would take longer is tried, once there are enough for a fit."""


def disk_jobs(bench: Bench, folder: str | os.PathLike[str]) -> list[Job]:
    """Writing to the disk that `folder` is on, and reading from it, by one process.

    Raises:
        InputError: the folder is none, cannot be written, or has too little room.
    """
    path = check_folder(folder, quick=bench.quick)
    return [Job("disk, written and read", ("disk_write", "disk_read"), lambda: disk_series(bench, path))]


def check_folder(folder: str | os.PathLike[str], *, quick: bool = False) -> Path:
    """`folder`, after making sure that a file can be made there and that there is room; `InputError` otherwise."""
    path, needed = Path(folder), FILE_BYTES[quick]
    if not path.is_dir():
        raise InputError(f"disk folder {os.fspath(folder)!r} is no folder; name one on the disk to be measured")
    try:
        with unnamed_file(FILES, path):
            pass
        free = FILES.free_bytes(path)
    except OSError as error:
        raise InputError(f"disk folder {os.fspath(folder)!r} cannot be written: {error.strerror}") from None
    if free < 2 * needed:
        raise InputError(
            f"disk folder {os.fspath(folder)!r} has {format_bytes(free)} free; {format_bytes(2 * needed)} are wanted "
            "to "
            "measure it: name another, or measure quickly"
        )
    warn_if_in_memory(path)
    return path


def free_disk_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes that are free to this user on the disk of `folder`."""
    return FILES.free_bytes(folder)


def disk_series(bench: Bench, folder: Path) -> list[Series]:
    """``disk_write`` (until the drive has the bytes) and ``disk_read``, over one file that is gone afterwards.

    Raises:
        InputError: the disk failed, or nothing gets past the page cache here.
    """
    size, plan = FILE_BYTES[bench.quick], bench.on("cpu").effort()
    sizes = geometric(SMALLEST_BYTES, size // LARGEST_SHARE, plan.amounts, DIRECT_BYTES)
    found = []
    try:
        with _file(folder, size) as file:
            for key, move in (("disk_write", file.write), ("disk_read", file.read)):
                how = (
                    f"{key.removeprefix('disk_')} of {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}, one "
                    "thread, one "
                    f"file on {file_system(folder)}, {file.how}"
                )
                cases = [(float(amount), partial(_in_turn, move, amount, size)) for amount in sizes]
                series = sweep(bench.on("cpu"), plan, key, "bytes", how, cases, longest_s=LONGEST_S)
                found.append(replace(series, how=how))  # threads of torch have no part in it
    except OSError as error:
        raise InputError(f"the disk of {folder} failed: {error.strerror}") from None
    return found


def _in_turn(move: Callable[[int, int], None], amount: int, file_bytes: int) -> Callable[[], object]:
    """Moves one window of the file after the other."""
    turns = itertools.cycle(range(0, file_bytes - amount + 1, amount))
    return lambda: move(next(turns), amount)


@dataclass(frozen=True)
class _MeasuredFile:
    file: File
    buffer: mmap.mmap

    @property
    def how(self) -> str:
        return "direct" if self.file.is_direct else "synchronised, pages dropped"

    def write(self, start: int, amount: int) -> None:
        """Until the drive has it. A direct write may still be in the drive's own cache, hence the sync."""
        with memoryview(self.buffer) as view:
            for done in range(0, amount, REQUEST_BYTES):
                with view[: min(REQUEST_BYTES, amount - done)] as part:
                    self.file.write(part, start + done)
        self.file.sync(sizes=False)
        self._drop()

    def read(self, start: int, amount: int) -> None:
        with memoryview(self.buffer) as view:
            for done in range(0, amount, REQUEST_BYTES):
                with view[: min(REQUEST_BYTES, amount - done)] as part:
                    if self.file.read_into(part, start + done) < len(part):
                        raise OSError(errno.EIO, "the file ended early")
        self._drop()

    def _drop(self) -> None:
        if not self.file.is_direct:
            self.file.drop_cache()


@contextlib.contextmanager
def _file(folder: Path, size: int) -> Iterator[_MeasuredFile]:
    """A file full of bytes that no drive can compress. It has no name any more, so it is gone whatever happens."""
    if not hasattr(os, "posix_fadvise"):
        raise InputError("this system has no way past the page cache, so its disks cannot be measured")
    with unnamed_file(FILES, folder, direct=True) as opened:
        # Not closed: where a transfer failed, the error's traceback still holds a view of it.
        buffer = aligned_buffer(REQUEST_BYTES)
        buffer[:] = os.urandom(REQUEST_BYTES)
        file = _MeasuredFile(opened, buffer)
        file.write(0, size)
        yield file
