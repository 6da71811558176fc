"""Measures how fast a disk reads and writes, past the page cache: the rates at which optimizer states on it move."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elixir.errors import InputError
from elixir.extents.extent_file import Extent, ExtentFile, Requests, fastest_requests
from elixir.files import DIRECT_BYTES, FILES, PathLike, aligned_buffer, file_system, warn_if_in_memory
from elixir.hardware.profile import HardwareProfile
from elixir.microbench.bench import Bench
from elixir.microbench.fitting import MIN_POINTS, Job, Series, geometric, sweep
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
        FILES.create_unnamed(path).close()
        free = FILES.free_bytes(path)
    except OSError as error:
        raise InputError(f"disk folder {os.fspath(folder)!r} cannot be written: {error.strerror}") from None
    if free < 2 * needed:
        raise InputError(
            f"disk folder {os.fspath(folder)!r} has {format_bytes(free)} free, and measuring it needs "
            f"{format_bytes(2 * needed)}; free some, name another folder, or measure quickly (--quick)"
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
        with measured_file(folders, size) as file:
            requests = file.find_requests(sizes[-1])
            how = f"of {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}, {requests}, {files}, {file.how}"
            points = _points(file, sizes, WINDOWS[bench.quick], WINDOW_S[bench.quick])
            for key, way in (("disk_write", "write"), ("disk_read", "read")):
                said = f"{way} {how}, reads and writes in turns as in a run"
                found.append(Series(key, "bytes", points[way], WINDOWS[bench.quick], said))
            cases = [(float(amount), partial(_in_turn, file.read_and_write, amount, size)) for amount in sizes]
            said = f"read and write at once {how}"
            both = sweep(bench.on("cpu"), plan, "disk_read.both", "bytes", said, cases, longest_s=LONGEST_S)
            found.append(replace(both, how=said))  # threads of torch have no part in it
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


def _points(file: MeasuredFile, sizes: Sequence[int], windows: int, window_s: float) -> dict[str, Points]:
    """(amount, median seconds) of the writes and of the reads of each amount."""
    seen: dict[int, list[InTurns]] = {}
    for amount in sizes:
        first = file.in_turns(amount, 0.0)  # pays for what is only done once
        if len(seen) >= MIN_POINTS and max(first.write_s, first.read_s) > LONGEST_S:
            break
        seen[amount] = []
    for _ in range(windows):
        for amount, found in seen.items():
            found.append(file.in_turns(amount, window_s))
    return {
        "write": tuple((float(amount), statistics.median(each.write_s for each in seen[amount])) for amount in seen),
        "read": tuple((float(amount), statistics.median(each.read_s for each in seen[amount])) for amount in seen),
    }


def _in_turn(move: Callable[[int, int], None], amount: int, file_bytes: int) -> Callable[[], object]:
    """Moves one window of the file after the other."""
    turns = itertools.cycle(range(0, file_bytes - amount + 1, amount))
    return lambda: move(next(turns), amount)


Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class InTurns:
    """Seconds of one transfer each way, while reads and writes take turns."""

    write_s: float
    read_s: float


@dataclass(frozen=True)
class MeasuredFile:
    """The file of a measurement: moved as states that live on a disk are."""

    file: ExtentFile
    extent: Extent
    buffers: tuple[mmap.mmap, mmap.mmap]
    """One to write from, one to read into."""
    _at: dict[int, int] = field(default_factory=dict)

    def in_turns(self, amount: int, window_s: float) -> InTurns:
        """Times transfers as a run makes them: reads and writes of `amount` bytes take turns for `window_s`, each at
        another offset, and the drive has all of it in the end."""
        spent, count = [0.0, 0.0], 0
        last = (self.extent.nbytes - amount) // DIRECT_BYTES * DIRECT_BYTES
        while not count or sum(spent) < window_s:
            at = self._at.get(amount, 0)
            began_s = time.perf_counter()
            self.file.write(self.extent, memoryview(self.buffers[0])[:amount], at)
            written_s = time.perf_counter()
            self.read(self._far(at, amount), amount)
            spent = [spent[0] + written_s - began_s, spent[1] + time.perf_counter() - written_s]
            count += 1
            self._at[amount] = at + amount if at + amount <= last else 0
        began_s = time.perf_counter()
        self.file.sync()
        return InTurns((spent[0] + time.perf_counter() - began_s) / count, spent[1] / count)

    def _far(self, start: int, amount: int) -> int:
        """Returns where to read while `start` is written: half a file later, which no drive has cached."""
        half = self.extent.nbytes // 2 // DIRECT_BYTES * DIRECT_BYTES
        return min((start + half) % self.extent.nbytes, self.extent.nbytes - amount)

    @property
    def how(self) -> str:
        return "direct" if self.file.is_direct else "synchronised, pages dropped"

    def find_requests(self, amount: int) -> Requests:
        """The requests with which so many bytes are moved fastest."""
        source, target = (memoryview(buffer)[:amount] for buffer in self.buffers)
        return fastest_requests(self.file, self.extent, source, target)

    def write(self, start: int, amount: int) -> None:
        """Writes until the drive has the bytes. A direct write may still be in the drive's cache, hence the sync."""
        self.file.write(self.extent, memoryview(self.buffers[0])[:amount], start)
        self.file.sync()

    def read(self, start: int, amount: int) -> None:
        self.file.read(self.extent, memoryview(self.buffers[1])[:amount], start)

    def read_and_write(self, start: int, amount: int) -> None:
        """Reads what comes half a file later than what it writes."""
        with ThreadPoolExecutor(1) as writer:
            writing = writer.submit(self.write, start, amount)
            self.read(self._far(start, amount), amount)
            writing.result()


@contextlib.contextmanager
def measured_file(folders: Sequence[PathLike], size: int) -> Iterator[MeasuredFile]:
    """A file full of bytes that no drive can compress. It has no name, so it is gone whatever happens.

    Args:
        folders: one on each drive.
        size: of the file; at most a quarter of it is moved at once.
    """
    if not hasattr(os, "posix_fadvise"):
        raise InputError("this system has no way past the page cache, so its disks cannot be measured")
    file = ExtentFile(folders)
    try:
        # Not closed: where a transfer failed, the error's traceback still holds a view of them.
        piece = size // LARGEST_SHARE
        buffers = aligned_buffer(piece), aligned_buffer(piece)
        buffers[0][:] = os.urandom(len(buffers[0]))
        measured = MeasuredFile(file, file.extent(size), buffers)
        for start in range(0, size, piece):
            measured.write(start, min(piece, size - start))
        yield measured
    finally:
        file.close()
