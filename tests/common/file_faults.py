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

CHANGES = ("create", "resize", "write", "sync", "link", "rename", "remove", "make", "sync_folder")


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
        if operation in ("link", "rename"):
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


class Crash:
    """All that may be in a folder after a crash, by POSIX's least promises, once a part of a record has been done.

    A name has any of the files that it had since the folder was last synchronised; a file has any of the writes since
    it was. "dropped" keeps none of those, "kept" all, as after ``kill -9``, and others a part.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        contents = {str(path): _Content(path.read_bytes()) for path in folder.iterdir()}
        self._now: dict[str, _Content | None] = dict(contents)
        self._may: dict[str, list[_Content | None]] = {name: [content] for name, content in contents.items()}

    def do(self, operation: Operation) -> None:
        """One more operation of the record."""
        name = operation.path
        if operation.name == "create":
            self._name(name, _Content(b""))
        elif operation.name in ("write", "resize"):
            self._at(name).since.append(operation)
        elif operation.name == "sync":
            content = self._at(name)
            content.synced, content.since = content.after(lambda: True), []
        elif operation.name == "link":
            self._name(name, self._at(operation.source))
        elif operation.name == "rename":
            if self._now.get(name) is not self._at(operation.source):
                self._name(name, self._at(operation.source))
                self._name(operation.source, None)
        elif operation.name == "remove":
            self._name(name, None)
        elif operation.name == "sync_folder":
            assert name == self._folder
            self._may = {each: [content] for each, content in self._now.items()}
        else:
            raise NotImplementedError(operation.name)

    def _at(self, name: str) -> _Content:
        content = self._now[name]
        assert content is not None
        return content

    def _name(self, name: str, content: _Content | None) -> None:
        self._now[name] = content
        self._may.setdefault(name, [None]).append(content)

    def outcomes(self, seeds: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        """(what it is, name -> bytes) of what a crash now may leave."""
        yield "dropped", self._left(lambda options: options[0], lambda: False)
        yield "kept", self._left(lambda options: options[-1], lambda: True)
        for seed in range(seeds):
            dice = random.Random(seed)
            yield f"seed {seed}", self._left(dice.choice, lambda dice=dice: dice.random() < 0.5)  # type: ignore[misc]

    def _left(
        self, chosen: Callable[[list[_Content | None]], _Content | None], kept: Callable[[], bool]
    ) -> dict[str, bytes]:
        found = {os.path.basename(name): chosen(options) for name, options in self._may.items()}
        return {name: content.after(kept) for name, content in found.items() if content is not None}
