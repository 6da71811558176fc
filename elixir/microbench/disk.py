"""Measures how fast a disk reads and writes, past the page cache: the rates at which optimizer states on it move."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elixir.errors import InputError
from elixir.extents.extent_file import REQUEST_BYTES, ExtentFile, file_system
from elixir.files import DIRECT_BYTES, FILES, PathLike, aligned_buffer
from elixir.hardware.profile import HardwareProfile
from elixir.microbench.bench import Bench, Job, seconds_of
from elixir.microbench.fitting import MIN_POINTS, Series
from elixir.units import MIB, format_bytes

FILE_BYTES = {False: 512 * MIB, True: 128 * MIB}
"""Size of the one file, by whether the measurement is quick. Each amount walks through all of it, so that no drive's
cache answers. Much smaller amounts are not measured: a measurement waits for the drive's cache after each
write, which a run does not, and that wait would be a good part of their time."""
LARGEST_SHARE = 4
"""The largest amount is this part of the file."""
SMALLEST_BYTES = MIB // 4
KEYS = ("disk_write", "disk_read", "disk_read.both", "disk_write.both")
LONGEST_S = 1.0
"""Limit on the seconds of an amount, once there are enough amounts for a fit."""
WINDOWS, WINDOW_S = {False: 7, True: 5}, {False: 0.2, True: 0.1}
"""Turns of each amount, and the least seconds of a turn, by whether the measurement is quick. Disks have fast and slow
seconds: each amount has one turn before any has the next, and the median counts."""


def disk_jobs(bench: Bench, *folders: PathLike) -> list[Job]:
    """The measurement of the disks that folders are on.

    Raises:
        InputError: a folder is none, cannot be written, or has too little room.
    """
    paths = [check_folder(folder, quick=bench.quick) for folder in folders]
    return [Job("disk, written and read", KEYS, measure=partial(disk_series, bench, *paths))]


def check_folder(folder: PathLike, *, quick: bool = False) -> Path:
    """`folder`, after making sure that a file can be made there and that there is room; `InputError` otherwise."""
    path, needed = Path(folder), FILE_BYTES[quick]
    if not path.is_dir():
        raise InputError(f"disk folder {os.fspath(folder)!r} is no folder; name one on the disk to be measured")
    try:
        FILES.create_unnamed(path).close()
        free = FILES.free_bytes(path)
    except OSError as error:
        raise InputError(f"disk folder {os.fspath(folder)!r} cannot be written: {error.strerror}") from None
    if free < 2 * needed:
        raise InputError(
            f"disk folder {os.fspath(folder)!r} has {format_bytes(free)} free, and measuring it needs "
            f"{format_bytes(2 * needed)}; free some, name another folder, or measure quickly (--quick)"
        )
    return path


def free_disk_bytes(*folders: PathLike) -> int:
    """Bytes that are free to this user for extents, which take as much of each folder; several may share a drive."""
    drives = [os.stat(folder).st_dev for folder in folders]
    parts = [FILES.free_bytes(folder) // drives.count(drive) for folder, drive in zip(folders, drives, strict=True)]
    return len(folders) * min(parts)


def disk_series(bench: Bench, *folders: Path) -> list[Series]:
    """``disk_write`` (until the drive has the bytes), ``disk_read``, and both at once, over one file that is gone
    afterwards, or one striped over several drives; with the requests of a run.

    Raises:
        InputError: the disk failed, or nothing gets past the page cache here.
    """
    size, quick = FILE_BYTES[bench.quick], bench.quick
    sizes = bench.on("cpu").sizes(SMALLEST_BYTES, DIRECT_BYTES, size // LARGEST_SHARE)
    turns: dict[int, list[tuple[float, ...]]] = {}
    try:
        with measured_file(folders, size) as file:
            for amount in sizes:
                first = file.in_turns(amount, 0.0)  # pays for what is only done once
                if len(turns) >= MIN_POINTS and max(first) > LONGEST_S:
                    break
                turns[amount] = []
            for _ in range(WINDOWS[quick]):
                for amount, seconds in turns.items():
                    seconds.append((*file.in_turns(amount, WINDOW_S[quick]), file.read_and_write(amount)))
            transfers = "direct" if file.file.is_direct else "synchronised, pages dropped"
    except OSError as error:
        raise InputError(f"the disk of {', '.join(map(str, folders))} failed: {error.strerror}") from None
    medians = {amount: [*map(statistics.median, zip(*seconds, strict=True))] for amount, seconds in turns.items()}
    files = " and ".join(f"one file on {file_system(folder)}" for folder in folders)
    least, most, request = (format_bytes(nbytes) for nbytes in (sizes[0], sizes[-1], REQUEST_BYTES))
    how = f"of {least} to {most}, requests of {request}, {files}, {transfers}"
    alone = [f"{way} {how}, reads and writes in turns as in a run" for way in ("write", "read")]
    said, columns = [*alone, *2 * [f"read and write at once {how}"]], (0, 1, 2, 2)
    return [
        Series(key, tuple((float(amount), medians[amount][column]) for amount in medians), WINDOWS[quick], text)
        for key, text, column in zip(KEYS, said, columns, strict=True)
    ]


def with_disk(profile: HardwareProfile, *folders: PathLike) -> HardwareProfile:
    """A profile with the rates of the disk that a folder is on, measured quickly; of several drives together if there
    are several folders.

    Raises:
        InputError: see `check_folder` and `disk_series`.
    """
    paths = [check_folder(folder, quick=True) for folder in folders]
    found = disk_series(Bench(torch.device("cpu"), quick=True), *paths)[:2]
    rates: dict[str, Any] = {f"{each.key}_bytes_per_s": each.per_s for each in found}
    sources = {f"{each.key}_bytes_per_s": each.how for each in found}
    return replace(profile, **rates, disk_free_bytes=free_disk_bytes(*paths), sources={**profile.sources, **sources})


class InTurns(NamedTuple):
    """Seconds of one transfer each way, while reads and writes take turns."""

    write_s: float
    read_s: float


class MeasuredFile:
    """The file of a measurement: moved as states that live on a disk are, and full of bytes that no drive can compress.

    Args:
        file: without a name, so it is gone whatever happens.
        size: of it; at most a quarter is moved at once.
    """

    def __init__(self, file: ExtentFile, size: int) -> None:
        self.file, self.extent, largest = file, file.extent(size), size // LARGEST_SHARE
        # Not closed: where a transfer failed, the error's traceback still holds a view of them.
        self._views = memoryview(aligned_buffer(largest)), memoryview(aligned_buffer(largest))
        """Memory to write from, and to read into."""
        self._end = 0
        self._views[0][:] = os.urandom(len(self._views[0]))
        for start in range(0, size, largest):
            self._write(start, min(largest, size - start))

    def in_turns(self, amount: int, window_s: float) -> InTurns:
        """Times transfers as a run makes them: reads and writes of `amount` bytes take turns for `window_s`, each at
        another offset, and the drive has all of it in the end."""
        write_s = read_s = 0.0
        count = 0
        while not count or write_s + read_s < window_s:
            start, far = self._next(amount)
            write_s += seconds_of(partial(self.file.write, self.extent, self._views[0][:amount], start))
            read_s += seconds_of(partial(self.file.read, self.extent, self._views[1][:amount], far))
            count += 1
        return InTurns((write_s + seconds_of(self.file.sync)) / count, read_s / count)

    def read_and_write(self, amount: int) -> float:
        """Reads and writes at the same time, until the drive has the bytes; returns the seconds that this took."""
        start, far = self._next(amount)

        def both() -> None:
            with ThreadPoolExecutor(1) as writer:
                writing = writer.submit(self._write, start, amount)
                self.file.read(self.extent, self._views[1][:amount], far)
                writing.result()

        return seconds_of(both)

    def _write(self, start: int, amount: int) -> None:
        """A direct write may still be in the drive's cache, hence the sync."""
        self.file.write(self.extent, self._views[0][:amount], start)
        self.file.sync()

    def _next(self, amount: int) -> tuple[int, int]:
        """Returns where to write, after the last write, and where to read: half a file later, which no drive has
        cached."""
        nbytes = self.extent.nbytes
        start = self._end if self._end + amount <= nbytes else 0
        self._end = start + amount
        half = nbytes // 2 // DIRECT_BYTES * DIRECT_BYTES
        return start, min((start + half) % nbytes, nbytes - amount)


@contextlib.contextmanager
def measured_file(folders: Sequence[PathLike], size: int) -> Iterator[MeasuredFile]:
    """A file for a measurement, as of `MeasuredFile`, striped over folders, one on each drive."""
    if not hasattr(os, "posix_fadvise"):
        raise InputError("this system has no way past the page cache, so its disks cannot be measured")
    with contextlib.closing(ExtentFile(folders)) as file:
        yield MeasuredFile(file, size)
