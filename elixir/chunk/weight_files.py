"""`WeightFiles`: weights that stay in the safetensors that they came in, and are read when they are used.

Reads go through the system's page cache, so what the machine has memory left for is read from the drive once. No file
is mapped: a file that becomes shorter while it is read gives an error and no signal.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from errno import EIO, ESTALE
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elixir.errors import FileError, InputError
from elixir.files import FILES, File, Files
from elixir.plan.chunk_plan import WeightFile
from elixir.units import MIB

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Names of dtypes in safetensors; tensors of others stay unknown."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, a little-endian number of so many bytes."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Pages of a file, at even distances, that are read to see whether it has changed, next to one of each tensor."""
_GOLDEN_RATIO = 0.618033988749895
"""Its multiples without their whole parts are spread evenly: the places of samples in one tensor after the other."""
READ_BYTES = 8 * MIB
"""Bytes of one request; larger reads are cut into several, which run at once."""
READ_THREADS = 4


class _Place(NamedTuple):
    """The place of a tensor."""

    file: int
    """Index of its file."""
    start: int
    """First byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class _Opened:
    """An open file."""

    path: Path
    file: File
    record: WeightFile
    stamp: tuple[int, int]
    """Its size and the time of its last change, when it was opened."""


class WeightFiles:
    """The tensors of some safetensors files, read in parts.

    Args:
        paths: the files.
        files: the file operations that it uses.

    Raises:
        InputError: a file is missing or is no safetensors file.
    """

    def __init__(self, paths: Sequence[str], files: Files = FILES) -> None:
        self._files, self._places = files, dict[str, _Place]()
        self._opened: list[_Opened] = []
        self._pool: ThreadPoolExecutor | None = None
        weakref.finalize(self, _close, self._opened)
        try:
            for path in paths:
                self._open(Path(path))
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            file = self._files.open(path)
        except FileError as error:
            raise InputError(f"{path} cannot be opened: {error.strerror}; say where it is with weights=") from error
        try:
            start, header = _header(file)
            stamp = _stamp(file)
            record = WeightFile(path.name, stamp[0], _digest(file, stamp[0]), stamp[1] // 1000)
            for name, entry in header.items():
                dtype = _DTYPES.get(entry["dtype"])
                first, end = (start + int(at) for at in entry["data_offsets"])
                shape = tuple(map(int, entry["shape"]))
                if dtype is None:
                    continue
                if end > stamp[0] or end - first != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{name} lies at bytes {first} to {end} of {stamp[0]}")
                self._places[name] = _Place(len(self._opened), first, dtype, shape)
        except (FileError, ValueError, KeyError, TypeError) as error:
            file.close()
            raise InputError(f"{path} is no whole safetensors file ({error}); download or save it again") from error
        self._opened.append(_Opened(path, file, record, stamp))

    @property
    def records(self) -> tuple[WeightFile, ...]:
        """The files as they are now, for a plan."""
        return tuple(opened.record for opened in self._opened)

    def check(self, planned: Iterable[WeightFile]) -> list[str]:
        """Compares the files with those that a plan was made with.

        Returns:
            The paths of files that were written or copied since, and whose samples are the same.

        Raises:
            InputError: one of those is missing, or has changed since.
        """
        written: list[str] = []
        folders = ", ".join(dict.fromkeys(str(opened.path.parent) for opened in self._opened))
        for record in planned:
            same_name = [opened for opened in self._opened if opened.record.name == record.name]
            if not same_name:
                raise InputError(
                    f"{record.name} is not among the files in weights= (of {folders}), but the plan leaves frozen "
                    "weights in it; name it, or plan again with the files that there are"
                )
            if all(opened.record != record for opened in same_name):
                found = same_name[0]
                sizes = (
                    f"{record.nbytes:,} bytes then, {found.record.nbytes:,} now"
                    if record.nbytes != found.record.nbytes
                    else "of the same size, with another header or other values"
                )
                raise InputError(
                    f"{found.path} has changed since the plan was made ({sizes}); restore it, or plan again"
                )
            times = {opened.record.modified_us for opened in same_name}
            if record.modified_us is not None and record.modified_us not in times:
                written.append(str(same_name[0].path))
        return written

    def place(self, names: Iterable[str]) -> tuple[str, torch.dtype, tuple[int, ...]] | None:
        """The first of some names that a file has, with dtype and shape; None if no file has any."""
        for name in names:
            if name in self._places:
                place = self._places[name]
                return name, place.dtype, place.shape
        return None

    def file_of(self, name: str) -> Path:
        """The file that has a tensor."""
        return self._opened[self._places[name].file].path

    def mapped(self, name: str) -> torch.Tensor:
        """A whole tensor as a private mapping of its file, which takes memory only as far as it is written to.

        Raises:
            FileError: the file was replaced since it was opened.
        """
        from safetensors import safe_open

        read = self._opened[self._places[name].file]
        if not os.path.samestat(os.stat(read.path), os.fstat(read.file.handle)):
            raise FileError(ESTALE, "another file took its place since the run began", str(read.path), "map")
        opened: Any = safe_open(read.path, framework="pt", device="cpu")
        found: torch.Tensor = opened.get_tensor(name)
        return found

    def read(self, parts: Iterable[tuple[str, int, torch.Tensor]]) -> None:
        """Fills memory with elements of tensors.

        Args:
            parts: the name of a tensor, its first element to read, and flat memory on the host, in its dtype.

        Raises:
            FileError: a file cannot be read, or has changed since it was opened.
        """
        requests: list[tuple[_Opened, memoryview, int]] = []
        used: dict[int, _Opened] = {}
        for name, first, memory in parts:
            place = self._places[name]
            used[place.file] = opened = self._opened[place.file]
            view: memoryview = memory.view(torch.uint8).numpy().data
            start = place.start + first * place.dtype.itemsize
            requests += [(opened, view[at : at + READ_BYTES], start + at) for at in range(0, len(view), READ_BYTES)]
        if len(requests) == 1:
            _read(*requests[0])
        else:
            self._pool = self._pool or ThreadPoolExecutor(READ_THREADS, "elixir weight file")
            started: list[Future[None]] = [self._pool.submit(_read, *request) for request in requests]
            errors = [error for error in (each.exception() for each in started) if error is not None]
            if errors:
                raise errors[0]
        for opened in used.values():  # afterwards: what was written before the reading has changed the time by now
            _refuse_changed(opened)

    def close(self) -> None:
        """Closes the files; nothing may read them any more."""
        if self._pool is not None:
            self._pool.shutdown()
        _close(self._opened)


@dataclass(frozen=True)
class FilePart:
    """A part of a tensor in a file, and where it belongs in a shard."""

    name: str
    """The tensor's name in its file."""
    first: int
    """Its first element there."""
    part: slice
    """Its elements in the shard."""


@dataclass(frozen=True)
class FileShard:
    """One rank's shard of a chunk's weights, in files."""

    files: WeightFiles
    parts: tuple[FilePart, ...]
    names: Mapping[str, str]
    """Name of each parameter of the chunk -> its name in the files."""
    numel: int
    """Elements of the shard, gaps included."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.numel * self.dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes that are read; gaps are not."""
        numel: int = sum(part.part.stop - part.part.start for part in self.parts)
        return numel * self.dtype.itemsize

    def read_into(self, memory: torch.Tensor) -> None:
        """Fills host memory of the shard's elements; gaps keep what they have. Raises as `WeightFiles.read`."""
        self.files.read((part.name, part.first, memory[part.part]) for part in self.parts)

    def mapped(self, parameter: str) -> torch.Tensor:
        """See `WeightFiles.mapped`, by the parameter's name in the model."""
        return self.files.mapped(self.names[parameter])

    def has(self, parameter: str, memory: torch.Tensor) -> bool:
        """Whether this rank's part of a parameter in `memory`, flat, has the bits that the file has."""
        part = next(part for part in self.parts if part.name == self.names[parameter])
        own = torch.empty(memory.numel(), dtype=self.dtype, device="cpu")
        self.files.read([(part.name, part.first, own)])
        other = memory.detach().to("cpu", self.dtype).contiguous()
        return torch.equal(own.view(torch.uint8), other.view(torch.uint8))

    def read(self) -> torch.Tensor:
        """The shard, in separate host memory."""
        memory = torch.zeros(self.numel, dtype=self.dtype, device="cpu")
        self.read_into(memory)
        return memory


def _close(opened: list[_Opened]) -> None:
    while opened:
        opened.pop().file.close()


def _header(file: File) -> tuple[int, Mapping[str, dict[str, Any]]]:
    """The first byte of the values, and what the header says of each tensor."""
    text = _header_text(file)
    return _LENGTH_BYTES + len(text), _entries(text)


def _entries(header: bytearray) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(header)
    entries.pop("__metadata__", None)
    return entries


def _header_text(file: File) -> bytearray:
    length = bytearray(_LENGTH_BYTES)
    if file.read_into(length, 0) < _LENGTH_BYTES:
        raise ValueError("it has no header")
    nbytes = int.from_bytes(length, "little")
    text = bytearray(min(nbytes, _stamp(file)[0]))  # no memory for a length that is wrong
    if file.read_into(text, _LENGTH_BYTES) < nbytes:
        raise ValueError("its header is cut off")
    return text


def _digest(file: File, nbytes: int) -> str:
    """Returns the digest of size, header and samples: of the file, and of each tensor at another place of it."""
    text = _header_text(file)
    found = hashlib.sha256(str(nbytes).encode() + text)
    samples = [(max(nbytes - SAMPLE_BYTES, 0) * number // SAMPLES, SAMPLE_BYTES) for number in range(SAMPLES + 1)]
    for number, entry in enumerate(_entries(text).values()):
        first, end = (_LENGTH_BYTES + len(text) + int(at) for at in entry["data_offsets"])
        taken = min(SAMPLE_BYTES, end - first)
        samples.append((first + int((end - first - taken) * (number * _GOLDEN_RATIO % 1)), taken))
    for at, nbytes in samples:
        memory = bytearray(nbytes)
        found.update(memory[: file.read_into(memory, at)])
    return found.hexdigest()[:16]


def _stamp(file: File) -> tuple[int, int]:
    found = os.fstat(file.handle)
    return found.st_size, found.st_mtime_ns


def _read(opened: _Opened, memory: memoryview, at: int) -> None:
    if opened.file.read_into(memory, at) < len(memory):
        raise FileError(EIO, "the file ended early: it has changed since the run began", str(opened.path), "read")


def _refuse_changed(opened: _Opened) -> None:
    """Raises if a file was written to since it was opened."""
    if _stamp(opened.file) != opened.stamp:
        text = "the file has changed since the run began, so steps would mix two sets of weights"
        raise FileError(ESTALE, text, str(opened.path), "read")
