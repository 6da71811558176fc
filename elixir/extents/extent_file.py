"""Extents: ranges of unnamed files, on one disk or striped over several, that hold what memory has no room for.

All room of an extent is taken when it is made, so no later write runs out of it. The files have no name: they are gone
once they are closed, however the process ends, and their contents are no checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import EIO
from pathlib import Path

from elixir.errors import FileError
from elixir.files import DIRECT_BYTES, FILES, File, Files, PathLike
from elixir.units import MIB

logger = logging.getLogger(__name__)

REQUEST_BYTES = 8 * MIB
"""Bytes of one call; the kernel cuts it into requests of the drive, so that one call is many of them in flight. On the
disks that were measured, neither larger nor more calls were faster (docs/appendix/formulas.md)."""


@dataclass(frozen=True)
class Extent:
    """A range of the files."""

    start: int
    """First byte, the same in every file."""
    stripe_bytes: int
    """Bytes of it in each file; a multiple of `DIRECT_BYTES`."""
    nbytes: int
    """Bytes that it holds; a multiple of `DIRECT_BYTES`."""


def whole_blocks(nbytes: int) -> int:
    """`nbytes`, rounded up to what a direct transfer moves."""
    return -(-nbytes // DIRECT_BYTES) * DIRECT_BYTES


class ExtentFile:
    """Extents of one process, in one file on each of some disks.

    Reads and writes of different extents may run at the same time, in several threads. All operations raise
    `FileError`.

    Args:
        folders: one on each disk; extents are striped over them, in parts of equal size.
        files: the file operations that it uses.
    """

    def __init__(self, folders: Sequence[PathLike], *, files: Files = FILES) -> None:
        self._files: list[File] = []
        self._end = 0
        self._free: list[Extent] = []
        self._pool: ThreadPoolExecutor | None = None
        weakref.finalize(self, _close, self._files)  # handles stay open when nothing refers to this any more
        try:
            for folder in folders:
                warn_if_in_memory(folder)
                self._files.append(files.create_unnamed(os.path.abspath(folder), direct=True))
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> str:
        """The folders, as an error names them."""
        return ", ".join(os.fspath(file.path) for file in self._files)

    @property
    def is_direct(self) -> bool:
        """Whether transfers go past the page cache, rather than having it dropped afterwards."""
        return all(file.is_direct for file in self._files)

    def extent(self, nbytes: int) -> Extent:
        """A new extent, which reads as zeros unless another one was given back before.

        Args:
            nbytes: it is rounded up to whole blocks.

        Raises:
            FileError: ENOSPC, where a disk has no room for it.
        """
        whole = whole_blocks(nbytes)
        stripe = whole_blocks(-(-whole // len(self._files)))
        for free in self._free:
            if free.stripe_bytes == stripe:
                self._free.remove(free)
                return Extent(free.start, stripe, whole)
        if stripe:
            for file in self._files:
                file.allocate(self._end, stripe)
        found = Extent(self._end, stripe, whole)
        self._end += stripe
        return found

    def give_back(self, extent: Extent) -> None:
        """Frees an extent."""
        self._free.append(extent)

    def read(self, extent: Extent, memory: memoryview, first: int = 0) -> None:
        """Fills `memory` with the bytes of an extent from `first` on.

        Args:
            extent: of this file.
            memory: bytes; it begins at a page, and its length is a multiple of `DIRECT_BYTES`.
            first: a multiple of `DIRECT_BYTES`.
        """

        def one(file: File, part: memoryview, at: int) -> None:
            if file.read_into(part, at) < len(part):
                raise FileError(EIO, "the file ended early", file.path, "read")
            if not file.is_direct:
                file.drop_cache()

        self._each(one, extent, memory, first)

    def write(self, extent: Extent, memory: memoryview, first: int = 0) -> None:
        """Writes `memory` to an extent from byte `first` on; arguments as of `read`."""

        def one(file: File, part: memoryview, at: int) -> None:
            file.write(part, at)
            if not file.is_direct:
                # Dirty pages are memory that no plan counts; they go once the drive has them.
                file.sync(sizes=False)
                file.drop_cache()

        self._each(one, extent, memory, first)

    def sync(self) -> None:
        """Waits until the drives have all that was written; for measurements."""
        for file in self._files:
            file.sync(sizes=False)

    def close(self) -> None:
        """Gives the files, and with them their room, back."""
        if self._pool is not None:
            self._pool.shutdown()
        _close(self._files)

    def _each(
        self, one: Callable[[File, memoryview, int], None], extent: Extent, memory: memoryview, first: int
    ) -> None:
        requests = []
        at, end = first, first + len(memory)
        while at < end:
            number, within = divmod(at, extent.stripe_bytes)
            size = min(REQUEST_BYTES, end - at, extent.stripe_bytes - within)
            part = memory[at - first : at - first + size]
            requests.append((self._files[number], part, extent.start + within))
            at += size
        if len(self._files) == 1 or len(requests) == 1:
            for request in requests:
                one(*request)
            return
        self._pool = self._pool or ThreadPoolExecutor(len(self._files), "elixir disk request")
        # In turns over the disks: requests that lie next to each other are of one disk.
        by_file = [[request for request in requests if request[0] is file] for file in self._files]
        turns = [each[i] for i in range(max(map(len, by_file))) for each in by_file if i < len(each)]
        started = [self._pool.submit(one, *request) for request in turns]
        errors = [error for error in (each.exception() for each in started) if error is not None]
        if errors:
            raise errors[0]


def _close(files: list[File]) -> None:
    with contextlib.ExitStack() as closing:  # one that fails must not keep the others open
        while files:
            closing.callback(files.pop().close)


def file_system(folder: PathLike) -> str:
    """Kind of the file system, such as ``ext4``; ``unknown`` where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    here, found = Path(folder).resolve(), (-1, "unknown")
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        mounted = Path(point.replace("\\040", " "))
        if mounted == here or mounted in here.parents:
            found = max(found, (len(mounted.parts), kind), key=lambda pair: pair[0])
    return found[1]


def warn_if_in_memory(folder: PathLike) -> None:
    """Logs a warning where `folder` is no disk but memory."""
    kind = file_system(folder)
    if kind in ("tmpfs", "ramfs"):
        logger.warning("disk folder %s is on %s, which is memory and no disk", os.fspath(folder), kind)
