"""Files on disk, for what must survive a crash: every operation goes through one object, so that a test can record or
fail it.

A crash of the machine keeps only what was synchronised: the bytes of a file by `File.sync`, its name, or another name
for it, by `Files.sync_folder`. A process that is killed loses nothing that a call has returned from.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from elixir.errors import FileError, InputError

T = TypeVar("T")
PathLike: TypeAlias = "str | os.PathLike[str]"
Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap"

DIRECT_BYTES = 4096
"""Direct transfers start, end and lie in memory at multiples of this: the logical block of drives and file systems is
no larger."""
FLUSH_EVERY_BYTES = 256 * 2**20
"""A file that is written in passing has no more than this in the page cache. Dirty pages count as memory of a
container, so without a limit the cache takes what a plan gave to optimizer states."""
BEGIN_BYTES = 2**20
"""Size of a piece that, with a limit, goes on its way to the drive at once."""

_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Error numbers of file systems without direct transfers, at the opening or at the first transfer."""
_NO_UNNAMED = (errno.EINVAL, errno.EISDIR, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of file systems, and of old kernels, that make no files without a name."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Error numbers of file systems without hard links, such as FAT and some network file systems."""


class Files:
    """The operations that crash-safe writers and readers use.

    Every one of them ends in `call`, which a test may override to record operations, to fail them, or to cut transfers
    short. All raise `FileError` with path and errno.
    """

    def call(self, operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
        """Makes one call of the operating system about `path`.

        Args:
            operation: ``create``, ``open``, ``size``, ``resize``, ``allocate``, ``write``, ``read``, ``sync``,
                ``drop``, ``close``, ``link``, ``rename``, ``remove``, ``make``, ``sync_folder``, ``list`` or
                ``free``.
            path: of the file or folder; of a renamed or linked one, the new name.
            function: from `os`.
            args: its arguments.
        """
        try:
            return function(*args)
        except OSError as error:
            raise FileError(error.errno or errno.EIO, error.strerror or str(error), path, operation) from error
        except (ValueError, OverflowError) as error:  # a path with a zero byte in it; a size beyond 2**63
            raise FileError(errno.EINVAL, str(error), path, operation) from error

    def _on_path(self, operation: str, path: PathLike, function: Callable[..., T], *more: Any) -> T:
        """`call` of a function whose first argument is the path."""
        name = os.fspath(path)
        return self.call(operation, name, function, name, *more)

    def create(
        self, path: PathLike, nbytes: int = 0, *, direct: bool = False, flush_every_bytes: int | None = None
    ) -> File:
        """Makes a file of `nbytes` zeros, to be written and read; it is an error if there is one.

        Args:
            path: its name.
            nbytes: its size. Writing past it makes it longer.
            direct: see `File`.
            flush_every_bytes: see `File`.
        """
        file = self._opened("create", path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct, flush_every_bytes)
        if nbytes:
            try:
                self.call("resize", file.path, os.ftruncate, file.handle, nbytes)
            except BaseException:
                file.close()
                self.remove(path)
                raise
        return file

    def open(self, path: PathLike) -> File:
        """Opens a file that is there to read it."""
        return self._opened("open", path, os.O_RDONLY, False, None)

    def create_unnamed(self, folder: PathLike, *, direct: bool = False) -> File:
        """Makes a file in `folder` that has no name, so it is gone once it is closed, however the process ends.

        Where the system cannot make one, it has a hidden name for a moment.
        """
        without_name: int = getattr(os, "O_TMPFILE", 0)
        if without_name:
            try:
                return self._opened("create", folder, os.O_RDWR | without_name, direct, None)
            except FileError as error:
                if error.errno not in _NO_UNNAMED:
                    raise
        name = temporary_name(os.path.join(os.fspath(folder), "elixir"))
        file = self.create(name, direct=direct)
        try:
            self.remove(name)
        except BaseException:
            file.close()
            raise
        return file

    def _opened(self, operation: str, path: PathLike, flags: int, direct: bool, flush: int | None) -> File:
        no_cache: int = getattr(os, "O_DIRECT", 0)
        if direct and no_cache:
            try:
                handle = self._on_path(operation, path, os.open, flags | no_cache, 0o666)
                return File(self, os.fspath(path), handle, True, flush)
            except FileError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                # Linux may have made the file before it found that its file system knows no direct transfers.
                flags &= ~os.O_EXCL
        return File(self, os.fspath(path), self._on_path(operation, path, os.open, flags, 0o666), False, flush)

    def size(self, path: PathLike) -> int:
        """Bytes of a file; `FileError` if it is missing, or no regular file."""
        found = self._on_path("size", path, os.stat)
        if not stat.S_ISREG(found.st_mode):
            raise FileError(errno.EINVAL, "no regular file", path, "size")
        return found.st_size

    def names(self, folder: PathLike) -> list[str]:
        """Names of what is in a folder, sorted."""
        return sorted(self._on_path("list", folder, os.listdir))

    def free_bytes(self, folder: PathLike) -> int:
        """Bytes that this user may still write to the disk that `folder` is on."""
        found = self._on_path("free", folder, os.statvfs)
        return found.f_bavail * found.f_frsize

    def make_folder(self, folder: PathLike) -> None:
        """Makes a folder, with those above it, where they are missing; the names survive a crash."""
        path = absolute(folder)
        missing = [path, *path.parents]
        missing = missing[: next((i for i, parent in enumerate(missing) if parent.is_dir()), len(missing))]
        for each in reversed(missing):
            try:
                self._on_path("make", each, os.mkdir)
            except FileError as error:
                # Another process was faster, which is as good. A file of that name is not.
                if error.errno != errno.EEXIST or not each.is_dir():
                    raise
            self.sync_folder(each.parent)

    def link(self, source: PathLike, target: PathLike) -> None:
        """Gives a file a second name; where the file system knows no links, a synchronised copy. `target` must be
        free."""
        name = os.fspath(target)
        try:
            self.call("link", name, os.link, os.fspath(source), name)
        except FileError as error:
            if error.errno not in _NO_LINKS:
                raise
            self.write_whole(name, self.read_whole(source))

    def replace(self, source: PathLike, target: PathLike) -> None:
        """Renames a file, over another one if there is one: whatever is killed when, `target` is the one or the
        other."""
        name = os.fspath(target)
        self.call("rename", name, os.replace, os.fspath(source), name)

    def remove(self, path: PathLike, *, missing_ok: bool = False) -> None:
        """Removes a file."""
        try:
            self._on_path("remove", path, os.unlink)
        except FileError as error:
            if not missing_ok or error.errno != errno.ENOENT:
                raise

    def remove_folder(self, folder: PathLike) -> None:
        """Removes an empty folder."""
        self._on_path("remove", folder, os.rmdir)

    def sync_folder(self, folder: PathLike) -> None:
        """Waits until the names in a folder are on the disk: what was created, renamed and removed in it."""
        handle = self._on_path("open", folder, os.open, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            self.call("sync_folder", os.fspath(folder), os.fsync, handle)
        except FileError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems whose folders need none
                raise
        finally:
            os.close(handle)

    def read_whole(self, path: PathLike, *, limit_bytes: int | None = None) -> bytes:
        """All bytes of a file; `FileError` with EFBIG if it has more than `limit_bytes`."""
        size = self.size(path)
        if limit_bytes is not None and size > limit_bytes:
            raise FileError(errno.EFBIG, f"{size} bytes, at most {limit_bytes} expected", path, "read")
        return self.read_first(path, size)

    def read_first(self, path: PathLike, nbytes: int) -> bytes:
        """The first bytes of a regular file, fewer where it is shorter."""
        content = bytearray(min(nbytes, self.size(path)))
        with self.open(path) as file:
            return bytes(memoryview(content)[: file.read_into(content, 0)])

    def read_stream(self, path: PathLike, *, limit_bytes: int) -> bytes:
        """Reads all bytes of a file, or of a pipe, whose size nobody knows."""
        name = os.fspath(path)
        with self.call("open", name, lambda: open(name, "rb")) as stream:
            found = os.fstat(stream.fileno())
            most = min(found.st_size, limit_bytes) if stat.S_ISREG(found.st_mode) else limit_bytes
            content = self.call("read", name, stream.read, most + 1)
        if len(content) > limit_bytes:
            raise FileError(errno.EFBIG, f"more than {limit_bytes} bytes", path, "read")
        return content

    def write_whole(self, path: PathLike, content: Buffer) -> None:
        """`write_new` with one buffer."""

        def write(temporary: str) -> None:
            with self.create(temporary) as file:
                file.write(content, 0)
                file.sync()

        self.write_new(path, write)

    def write_new(self, path: PathLike, write: Callable[[str], object]) -> None:
        """Has `write` write a file next to `path`, and renames it there, over another one if there is one.

        Whatever is killed when, `path` is the old file or the whole new one. After a crash of the machine it may be the
        old one still, until the folder is synchronised; or a damaged one, if `write` has not synchronised the file.
        """
        name = os.fspath(path)
        temporary = temporary_name(name)
        try:
            write(temporary)
            self.replace(temporary, name)
        except BaseException:
            with contextlib.suppress(FileError):
                self.remove(temporary, missing_ok=True)
            raise


class File(contextlib.AbstractContextManager["File"]):
    """An open file: pieces of it are written anywhere, by one thread at a time, and read by any number.

    Args:
        files: through which it was opened.
        path: its name, for errors.
        handle: of the operating system.
        direct: transfers go past the page cache. They must then begin, end and lie in memory at multiples of
            `DIRECT_BYTES`, as what `aligned_buffer` gives does. Where the file system knows no such transfers, the
            page cache takes part and `is_direct` is False.
        flush_every_bytes: after so many written bytes, wait until the drive has them and drop them from the page
            cache. None: the system decides when.
    """

    def __init__(
        self, files: Files, path: str, handle: int, direct: bool = False, flush_every_bytes: int | None = None
    ) -> None:
        self.path, self.handle, self.is_direct = path, handle, direct
        self._files, self._flush_every, self._unflushed = files, flush_every_bytes, 0
        self._failed_sync: FileError | None = None

    def write(self, data: Buffer, offset: int) -> None:
        """Writes all of `data` at byte `offset`."""
        with memoryview(data) as whole, whole.cast("B") as view:
            self._transfer("write", os.pwrite, view, offset)
            self._unflushed += len(view)
            if self._flush_every is not None and len(view) >= BEGIN_BYTES:
                # Linux begins to write these pages, so the drive works while the caller prepares what comes next.
                self.drop_cache(offset, len(view))
        if self._flush_every is not None and self._unflushed >= self._flush_every:
            self.sync(sizes=False)
            self.drop_cache()

    def read_into(self, buffer: bytearray | memoryview | mmap.mmap, offset: int) -> int:
        """Fills `buffer` from byte `offset` on; how many bytes there were, fewer only at the end of the file."""
        with memoryview(buffer) as whole, whole.cast("B") as view:
            return self._transfer("read", _read, view, offset)

    def _transfer(self, operation: str, function: Callable[..., int], view: memoryview, offset: int) -> int:
        if self.is_direct and (offset % DIRECT_BYTES or len(view) % DIRECT_BYTES):
            raise InputError(
                f"{self.path} was opened for direct transfers, which begin and end at multiples of {DIRECT_BYTES} "
                f"bytes; found {len(view)} bytes at {offset}"
            )
        done = 0
        while done < len(view):
            try:
                count = self._files.call(
                    operation, self.path, function, self.handle, view[done:] if done else view, offset + done
                )
            except FileError as error:
                if not self.is_direct or error.errno not in _NO_DIRECT:
                    raise
                # The file system took the flag at opening but not the transfer; or the last one ended off a block.
                import fcntl  # missing on some systems, which have no direct transfers

                flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
                fcntl.fcntl(self.handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.is_direct = False
                continue
            if not count:
                if operation == "read":
                    break
                raise FileError(errno.EIO, "the system wrote nothing", self.path, operation)
            done += count
        return done

    def allocate(self, start: int, nbytes: int) -> None:
        """Takes room on the disk from byte `start` on, which reads as zeros: no write to it runs out of room.

        Where the system cannot, the file only becomes longer.
        """
        if hasattr(os, "posix_fallocate"):
            try:
                self._files.call("allocate", self.path, os.posix_fallocate, self.handle, start, nbytes)
                return
            except FileError as error:
                if error.errno not in _NO_DIRECT:
                    raise
        self._files.call("resize", self.path, os.ftruncate, self.handle, start + nbytes)

    def sync(self, *, sizes: bool = True) -> None:
        """Waits until the drive has all that was written; without `sizes`, times and such may come later.

        After a failure the system forgets which pages were not written, and would report success the next time. So a
        file that could not be synchronised once stays failed.
        """
        if self._failed_sync is not None:
            raise self._failed_sync
        function = os.fsync if sizes else getattr(os, "fdatasync", os.fsync)
        try:
            self._files.call("sync", self.path, function, self.handle)
        except FileError as error:
            self._failed_sync = error
            raise
        self._unflushed = 0

    def drop_cache(self, start: int = 0, nbytes: int = 0) -> None:
        """Lets the page cache forget a part of this file, or with 0 bytes all from `start` on; only what is
        synchronised goes."""
        if hasattr(os, "posix_fadvise"):
            self._files.call("drop", self.path, os.posix_fadvise, self.handle, start, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Gives the handle back; closing twice is harmless."""
        if self.handle >= 0:
            handle, self.handle = self.handle, -1
            self._files.call("close", self.path, os.close, handle)

    def __exit__(self, *_: object) -> None:
        self.close()


FILES = Files()
"""The operations as they are."""


def aligned_buffer(nbytes: int) -> mmap.mmap:
    """Memory that direct transfers take, rounded up to a multiple of `DIRECT_BYTES`; freed with its last view."""
    return mmap.mmap(-1, -(-max(1, nbytes) // DIRECT_BYTES) * DIRECT_BYTES)  # anonymous maps begin at a page


def absolute(path: PathLike) -> Path:
    """`path` as seen from the present working folder, without ``..``; a link at its end stays a link.

    A program that moves to another folder later still means this path, and ``a/../b`` needs no ``a``.
    """
    parent, name = os.path.split(os.path.join(os.getcwd(), os.fspath(path)).rstrip(os.sep))
    if name in ("", os.curdir, os.pardir):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(parent), name)


def temporary_name(path: PathLike) -> str:
    """A hidden name next to `path` that no other file has."""
    folder, name = os.path.split(os.fspath(path))
    return os.path.join(folder, f".{name[:60]}.{uuid.uuid4().hex[:12]}")


def _read(handle: int, view: memoryview, offset: int) -> int:
    return os.preadv(handle, [view], offset)
