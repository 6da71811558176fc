"""How fast a disk reads and writes, past the page cache: what optimizer states that live there would be moved at."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elixir.errors import InputError
from elixir.extents import Extent, ExtentFile, Requests, fastest_requests
from elixir.files import DIRECT_BYTES, FILES, PathLike, aligned_buffer, file_system, unnamed_file, warn_if_in_memory
from elixir.hardware import HardwareProfile
from elixir.microbench.fitting import Job, Series, geometric, sweep
from elixir.microbench.measurement import Bench
from elixir.units import MIB, format_bytes

FILE_BYTES = {False: 512 * MIB, True: 128 * MIB}
"""Size of the one file, by whether it is quick. Each amount walks through all of it, so that no drive's cache
answers. A run does not wait for the drive's cache after each write as a measurement does: of amounts that are much
smaller that would be a good part of the time."""
LARGEST_SHARE = 4
"""The largest amount is this part of the file."""
SMALLEST_BYTES = MIB // 4
KEYS = ("disk_write", "disk_read", "disk_read.both", "disk_write.both")
LONGEST_S = 1.0
"""No amount that would take longer is tried, once there are enough for a fit."""


def disk_jobs(bench: Bench, *folders: PathLike) -> list[Job]:
    """Writing to the disk that a folder is on, and reading from it, by one process; or several drives together.

    Raises:
        InputError: a folder is none, cannot be written, or has too little room.
    """
    paths = [check_folder(folder, quick=bench.quick) for folder in folders]
    return [Job("disk, written and read", KEYS, lambda: disk_series(bench, *paths))]


def check_folder(folder: PathLike, *, quick: bool = False) -> Path:
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


def free_disk_bytes(*folders: PathLike) -> int:
    """Bytes that are free to this user for extents, which take as much of each folder; several may share a drive."""
    drives = [os.stat(folder).st_dev for folder in folders]
    parts = [FILES.free_bytes(folder) // drives.count(drive) for folder, drive in zip(folders, drives, strict=True)]
    return len(folders) * min(parts)


def disk_series(bench: Bench, *folders: Path) -> list[Series]:
    """``disk_write`` (until the drive has the bytes), ``disk_read``, and both at once, over one file that is gone
    afterwards, or one striped over several drives; with the requests that these move fastest.

    Raises:
        InputError: the disk failed, or nothing gets past the page cache here.
    """
    size, plan = FILE_BYTES[bench.quick], bench.on("cpu").effort()
    sizes = geometric(SMALLEST_BYTES, size // LARGEST_SHARE, plan.amounts, DIRECT_BYTES)
    found, where = [], ", ".join(str(folder) for folder in folders)
    files = " and ".join(f"one file on {file_system(folder)}" for folder in folders)
    try:
        with _file(folders, size) as file:
            requests = file.find_requests(sizes[-1])
            for key, move in (
                ("disk_write", file.write),
                ("disk_read", file.read),
                ("disk_read.both", file.read_and_write),
            ):
                way = "write" if key == "disk_write" else "read" if key == "disk_read" else "read and write at once"
                how = f"{way} of {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}, {requests}, {files}, {file.how}"
                cases = [(float(amount), partial(_in_turn, move, amount, size)) for amount in sizes]
                series = sweep(bench.on("cpu"), plan, key, "bytes", how, cases, longest_s=LONGEST_S)
                found.append(replace(series, how=how))  # threads of torch have no part in it
    except OSError as error:
        raise InputError(f"the disk of {where} failed: {error.strerror}") from None
    return [*found, replace(found[-1], key="disk_write.both")]


def with_disk(profile: HardwareProfile, *folders: PathLike) -> HardwareProfile:
    """A profile with the rates of the disk that a folder is on, measured quickly; of several drives together if there
    are several folders.

    Raises:
        InputError: see `check_folder` and `disk_series`.
    """
    paths = [check_folder(folder, quick=True) for folder in folders]
    series = {each.key: each for each in disk_series(Bench(torch.device("cpu"), quick=True), *paths)}
    rates: dict[str, Any] = {}
    for way in ("disk_read", "disk_write"):
        amount, seconds = series[way].points[-1]
        rates[f"{way}_bytes_per_s"] = amount / seconds
    sources = {name: series[name.removesuffix("_bytes_per_s")].how for name in rates}
    return replace(profile, **rates, disk_free_bytes=free_disk_bytes(*paths), sources={**profile.sources, **sources})


def _in_turn(move: Callable[[int, int], None], amount: int, file_bytes: int) -> Callable[[], object]:
    """Moves one window of the file after the other."""
    turns = itertools.cycle(range(0, file_bytes - amount + 1, amount))
    return lambda: move(next(turns), amount)


@dataclass(frozen=True)
class _MeasuredFile:
    """The file of a measurement: moved as states that live on a disk are."""

    file: ExtentFile
    extent: Extent
    buffers: tuple[mmap.mmap, mmap.mmap]
    """One to write from, one to read into."""

    @property
    def how(self) -> str:
        return "direct" if self.file.is_direct else "synchronised, pages dropped"

    def find_requests(self, amount: int) -> Requests:
        """The requests with which so many bytes are moved fastest."""
        source, target = (memoryview(buffer)[:amount] for buffer in self.buffers)
        return fastest_requests(self.file, self.extent, source, target)

    def write(self, start: int, amount: int) -> None:
        """Until the drive has it. A direct write may still be in the drive's own cache, hence the sync."""
        self.file.write(self.extent, memoryview(self.buffers[0])[:amount], start)
        self.file.sync()

    def read(self, start: int, amount: int) -> None:
        self.file.read(self.extent, memoryview(self.buffers[1])[:amount], start)

    def read_and_write(self, start: int, amount: int) -> None:
        """Reads what comes half a file later than what it writes."""
        half = self.extent.nbytes // 2 // DIRECT_BYTES * DIRECT_BYTES
        other = (start + half) % self.extent.nbytes
        with ThreadPoolExecutor(1) as writer:
            writing = writer.submit(self.write, start, amount)
            self.read(min(other, self.extent.nbytes - amount), amount)
            writing.result()


@contextlib.contextmanager
def _file(folders: Sequence[Path], size: int) -> Iterator[_MeasuredFile]:
    """A file full of bytes that no drive can compress. It has no name, so it is gone whatever happens."""
    if not hasattr(os, "posix_fadvise"):
        raise InputError("this system has no way past the page cache, so its disks cannot be measured")
    file = ExtentFile(folders)
    try:
        # Not closed: where a transfer failed, the error's traceback still holds a view of them.
        piece = size // LARGEST_SHARE
        buffers = aligned_buffer(piece), aligned_buffer(piece)
        buffers[0][:] = os.urandom(len(buffers[0]))
        measured = _MeasuredFile(file, file.extent(size), buffers)
        for start in range(0, size, piece):
            measured.write(start, min(piece, size - start))
        yield measured
    finally:
        file.close()
