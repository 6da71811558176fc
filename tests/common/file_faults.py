"""Files that record what is done to them, fail, or move only a part; and what a crash of the machine may leave of a
record."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elixir.errors import FileError
from elixir.files import Files

CHANGES = ("create", "resize", "write", "sync", "rename", "remove", "make", "sync_folder")


@dataclass(frozen=True)
class Operation:
    """One change: what, of which path, from which other name, and which bytes where."""

    name: str
    path: str
    source: str = ""
    data: bytes = b""
    offset: int = 0


class UnsyncedFiles(Files):
    """Does not wait for the disk: what a test writes need not survive a crash of this machine."""

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation in ("sync", "sync_folder"):
            return None
        return super().call(operation, path, function, *args)


class RecordingFiles(UnsyncedFiles):
    """Does everything else, and keeps the changes in order."""

    def __init__(self) -> None:
        self.log: list[Operation] = []

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        result = super().call(operation, path, function, *args)
        if operation == "rename":
            self.log.append(Operation(operation, path, source=args[0]))
        elif operation == "write":
            self.log.append(Operation(operation, path, data=bytes(args[1][:result]), offset=args[2]))
        elif operation == "resize":
            self.log.append(Operation(operation, path, offset=args[1]))
        elif operation in CHANGES:
            self.log.append(Operation(operation, path))
        return result


class FailingFiles(RecordingFiles):
    """Fails the `at`-th change, and with `forever` all later ones. Keeps those that do not fail."""

    def __init__(
        self, at: int, code: int = errno.ENOSPC, *, forever: bool = False, only: tuple[str, ...] = CHANGES
    ) -> None:
        super().__init__()
        self.at, self.code, self.forever, self.only, self.count = at, code, forever, only, 0

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation in self.only:
            self.count += 1
            if self.count == self.at or (self.forever and self.count > self.at):
                raise FileError(self.code, os.strerror(self.code), path, operation)
        return super().call(operation, path, function, *args)


class ShortFiles(UnsyncedFiles):
    """Every transfer moves at most a few thousand bytes, as a network file system or a signal may have it."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation in ("read", "write"):
            handle, view, offset = args
            args = handle, view[: self._random.randint(1, 50_000)], offset
        return super().call(operation, path, function, *args)


@dataclass
class _Content:
    """The identity of a file, whatever its names."""

    synced: bytes
    since: list[Operation] = field(default_factory=list)

    def after(self, kept: Callable[[], bool]) -> bytes:
        content = bytearray(self.synced)
        for operation in self.since:
            if not kept():
                continue
            end = operation.offset + len(operation.data)
            content += bytes(max(0, end - len(content)))
            content[operation.offset : end] = operation.data
            if operation.name == "resize":
                del content[operation.offset :]
        return bytes(content)


class _Folder:
    """A folder, and all that it may hold after a crash."""

    def __init__(self, path: Path | None = None) -> None:
        inside = sorted(path.iterdir()) if path is not None else []
        self.files: dict[str, list[_Content | None]] = {
            each.name: [_Content(each.read_bytes())] for each in inside if each.is_file()
        }
        """By name, what it has been since the folder was synchronised."""
        self.folders: list[dict[str, _Folder]] = [{each.name: _Folder(each) for each in inside if each.is_dir()}]
        """The folders in it since then, one after the other."""

    def name_file(self, name: str, content: _Content | None) -> None:
        self.files.setdefault(name, [None]).append(content)

    def file(self, name: str) -> _Content | None:
        return self.files.get(name, [None])[-1]

    def sync(self) -> None:
        self.files = {name: found[-1:] for name, found in self.files.items()}
        self.folders = self.folders[-1:]

    def left(self, choose: Callable[[list[Any]], Any], kept: Callable[[], bool], path: str = "") -> dict[str, bytes]:
        chosen = {name: choose(found) for name, found in self.files.items()}
        found = {path + name: content.after(kept) for name, content in chosen.items() if content is not None}
        for name, folder in choose(self.folders).items():
            found |= folder.left(choose, kept, f"{path}{name}/")
        return found


class Crash:
    """All that may be in a folder after a crash, once a part of a record has been done.

    By POSIX's least promises, a name has any of the files that it had since its folder was last synchronised; a file
    has any of the writes since it was. Folders have names as in file systems with a journal: a rename reaches the disk
    as a whole, and after those before it. "dropped" keeps none of those, "kept" all, as after ``kill -9``, and others a
    part.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._path, self._root = folder, _Folder(folder)

    def do(self, operation: Operation) -> None:
        """One more operation of the record."""
        path = Path(operation.path)
        if operation.name == "sync_folder":
            if path.is_relative_to(self._path):
                self._folder(path).sync()
            return
        folder, name = self._folder(path.parent), path.name
        if operation.name == "create":
            folder.name_file(name, _Content(b""))
        elif operation.name in ("write", "resize", "sync"):
            content = folder.file(name)
            assert content is not None
            if operation.name == "sync":
                content.synced, content.since = content.after(lambda: True), []
            else:
                content.since.append(operation)
        elif operation.name == "make":
            folder.folders.append(folder.folders[-1] | {name: _Folder()})
        elif operation.name == "rename":
            source = Path(operation.source)
            before = self._folder(source.parent)
            now = dict(before.folders[-1])
            if source.name in now:
                assert before is folder
                moved = now.pop(source.name)
                folder.folders.append(now | {name: moved})
            else:
                folder.name_file(name, before.file(source.name))
                before.name_file(source.name, None)
        elif operation.name == "remove":
            now = dict(folder.folders[-1])
            if now.pop(name, None) is not None:
                folder.folders.append(now)
            else:
                folder.name_file(name, None)
        else:
            raise NotImplementedError(operation.name)

    def _folder(self, path: Path) -> _Folder:
        found = self._root
        for name in path.relative_to(self._path).parts:
            found = found.folders[-1][name]
        return found

    def outcomes(self, seeds: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        """(what it is, path in the folder -> bytes) of what a crash now may leave."""
        yield "dropped", self._root.left(lambda options: options[0], lambda: False)
        yield "kept", self._root.left(lambda options: options[-1], lambda: True)
        for seed in range(seeds):
            dice = random.Random(seed)
            yield f"seed {seed}", self._root.left(dice.choice, lambda dice=dice: dice.random() < 0.5)  # type: ignore[misc]


def lay_out(folder: Path, content: dict[str, bytes]) -> Path:
    """Makes a folder with files, by their paths in it."""
    folder.mkdir()
    for name, raw in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The files in a folder and in those inside of it, by their paths in it."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
