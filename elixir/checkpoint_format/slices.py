"""Tensors of a checkpoint and the files of flat slices that hold them: safetensors layout, written piece by piece in
any order, with a checksum of every span.

The header comes first and is known beforehand, because sizes are. Its ``DCP_SHARDING_INFO`` says where in the flattened
tensor each slice begins, so that torch's `HuggingFaceStorageReader` reads all files of a folder as flat tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from elixir.errors import FileError, InputError, StateError
from elixir.files import FILES, FLUSH_EVERY_BYTES, Buffer, Files
from elixir.memory_order import Order
from elixir.units import MIB, dtype_name

# --- saved tensor ----------------------------------------------------------------------------------------------------
# Tensors of a checkpoint: how each is cut into pieces, which file a piece lies in, and the checksums of its spans.


checksum = xxh3_64_intdigest
"""The checksum of a span: xxh3 of 64 bits, which takes less time than a copy of the bytes, and no interpreter lock."""
CHECKSUM_KIND = "xxh3_64"
"""Name of the checksum in the index of a checkpoint."""
SPAN_BYTES = 4 * MIB
"""A span is what is written, checked and read at once; every span of a piece has a checksum. The last one may be
shorter."""

SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""Dtypes that a checkpoint holds, under their names in headers of safetensors files."""
STORED_DTYPES = {dtype_name(dtype): dtype for dtype in SAFETENSORS_NAMES}
"""The same dtypes by the names that the index uses."""


def scalar_state(value: Any) -> Any:
    """A state that is no tensor over the elements of a parameter, as an optimizer keeps it.

    Args:
        value: a number, or (name of a dtype, number) for a tensor without dimensions, which lies in host memory.
    """
    return torch.tensor(value[1], dtype=getattr(torch, value[0]), device="cpu") if isinstance(value, tuple) else value


_TOO_MANY_BYTES = 2**63
"""torch counts bytes in 64 bits. For an empty tensor it counts as if sizes of 0 were 1."""


@dataclass(frozen=True)
class Piece:
    """A range of a flattened tensor, and where it lies."""

    file: str
    start: int
    """First element."""
    numel: int
    offset: int
    """First byte in the file."""
    checksums: tuple[int, ...]
    """One for every span of `SPAN_BYTES`, in order."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.numel < 1 or self.offset < 8:
            raise InputError(
                f"a piece has start 0 or more, numel 1 or more and offset 8 or more, found {self.start}, {self.numel} "
                f"and {self.offset}"
            )
        if any(value < 0 for value in self.checksums):
            raise InputError("a checksum is at least 0")

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, with its pieces in one rank's file or in all files."""

    dtype: str
    shape: tuple[int, ...]
    order: Order | None
    """Order of the dimensions in which the elements lie, that of the weights in the run that saved them. None: the
    order of `shape`."""
    block_numel: int | None
    """Elements of 8-bit codes that share a scale, counted from the first; the scales are another tensor. None for all
    other tensors."""
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if self.dtype not in STORED_DTYPES:
            raise InputError(f"dtype {self.dtype!r:.40} is none that a checkpoint holds")
        if any(size < 0 for size in self.shape):
            raise InputError(f"shape {list(self.shape)} has a negative size")
        if math.prod(size or 1 for size in self.shape) * self.itemsize >= _TOO_MANY_BYTES:
            raise InputError(f"shape {list(self.shape)!s:.80} is larger than any memory")
        if self.order is not None and sorted(self.order) != list(range(len(self.shape))):
            raise InputError(f"order {list(self.order)} does not name the {len(self.shape)} dimensions once each")
        if self.block_numel is not None and self.block_numel < 1:
            raise InputError(f"blocks of {self.block_numel} elements make no sense")
        for piece in self.pieces:
            nbytes, found = piece.numel * self.itemsize, len(piece.checksums)
            if found != span_count(nbytes):
                raise InputError(f"a piece of {nbytes} bytes has {span_count(nbytes)} spans, found {found} checksums")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a `torch.dtype`."""
        return STORED_DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.torch_dtype.itemsize

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def uncovered(self) -> str:
        """Says why the pieces are not the whole tensor exactly once, in order; empty if they are."""
        at = 0
        for piece in self.pieces:
            if piece.start != at:
                return f"a piece begins at element {piece.start}, the one before ends at {at}"
            at = piece.stop
        return "" if at == self.numel else f"pieces end at element {at}, the tensor has {self.numel}"


def span_count(nbytes: int) -> int:
    """Spans of a piece of `nbytes`."""
    return -(-nbytes // SPAN_BYTES)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InputError(
            f"a contiguous tensor in host memory is needed, found {tensor.device}, strides {tensor.stride()}"
        )
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


# --- slices ----------------------------------------------------------------------------------------------------------


HEADER_MULTIPLE_BYTES = 4096
"""Headers are padded so that data begin at a page."""
LARGEST_HEADER_BYTES = 100_000_000
"""Readers of safetensors refuse longer ones."""


@dataclass(frozen=True)
class Slice:
    """A range of a flattened tensor that one rank saves."""

    key: str
    shape: tuple[int, ...]
    """The whole tensor's."""
    dtype: torch.dtype
    start: int
    numel: int
    block_numel: int | None = None
    """See `SavedTensor.block_numel`."""
    order: Order | None = None
    """See `SavedTensor.order`."""

    def __post_init__(self) -> None:
        if self.dtype not in SAFETENSORS_NAMES:
            raise InputError(
                f"{self.key}: {self.dtype} cannot be saved; convert it to one of {sorted(SAFETENSORS_NAMES.values())}"
            )
        whole = math.prod(self.shape)
        if not (self.start >= 0 and self.numel >= 0 and self.start + self.numel <= whole):
            raise InputError(f"{self.key}: elements {self.start} to {self.start + self.numel} of {whole} make no sense")

    @property
    def nbytes(self) -> int:
        """Bytes of the slice."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """A file of slices that is written and synchronised; the index is made from those of all ranks."""

    name: str
    nbytes: int
    tensors: dict[str, SavedTensor]
    """Key -> the tensor with its pieces that are in this file."""


class SliceWriter:
    """Writes one file of slices. Spans come in any order, from one thread at a time.

    Args:
        path: of the new file.
        slices: everything that will be in it, at most one slice for each key.
        files: the operations it uses.

    Raises:
        InputError: a key twice, or names too long for a header.
        FileError: the file cannot be made.

    Example:
        >>> slices = [Slice("weight/w", (4,), torch.float32, 0, 4)]
        >>> writer = SliceWriter(folder / "0badcafe-rank-00000-of-00001.safetensors", slices)
        >>> writer.write_tensor("weight/w", torch.ones(4))
        >>> written = writer.finish()
    """

    def __init__(self, path: str | os.PathLike[str], slices: Iterable[Slice], *, files: Files = FILES) -> None:
        self.path = Path(path)
        self._files = files
        given = list(slices)
        self._slices = {each.key: each for each in given}
        if len(self._slices) < len(given):
            raise InputError(f"{self.path.name}: a key occurs twice; a file holds one slice of each tensor")
        # Wide elements first: then every slice begins at a multiple of its element's size.
        ordered = sorted(given, key=lambda each: -each.dtype.itemsize)
        header = slice_header(ordered)
        self._offsets, at = {}, len(header)
        for each in ordered:
            self._offsets[each.key] = at
            at += each.nbytes
        self.nbytes = at
        self._checksums: dict[str, list[int | None]] = {each.key: [None] * span_count(each.nbytes) for each in ordered}
        self._file = files.create(self.path, at, flush_every_bytes=FLUSH_EVERY_BYTES)
        self._checking = ThreadPoolExecutor(1, "elixir checksums")
        try:
            self._file.write(header, 0)
        except BaseException:
            self.abandon()
            raise

    def spans(self, key: str) -> Iterator[tuple[int, int]]:
        """(number, bytes) of every span of a slice that is not written yet."""
        for number, found in enumerate(self._checksums[key]):
            if found is None:
                yield number, self._span_bytes(key, number)

    def write_span(self, key: str, number: int, data: Buffer) -> None:
        """Writes one span: bytes from ``number * SPAN_BYTES`` of the slice on. The caller keeps `data` unchanged
        meanwhile."""
        expected = self._span_bytes(key, number)
        with memoryview(data) as whole, whole.cast("B") as view:
            if len(view) != expected or self._checksums[key][number] is not None:
                raise StateError(
                    f"{self.path.name}: span {number} of {key} has {expected} bytes and is written once, found "
                    f"{len(view)} bytes"
                )
            checked = self._checking.submit(checksum, view)
            try:
                self._file.write(view, self._offsets[key] + number * SPAN_BYTES)
            finally:
                found = checked.result()  # it still reads the caller's memory
        self._checksums[key][number] = found

    def write_tensor(self, key: str, tensor: torch.Tensor) -> None:
        """Writes all of a slice, or what is left of it, from a contiguous tensor in host memory."""
        expected = self._slices[key]
        if tensor.dtype != expected.dtype or tensor.numel() != expected.numel:
            raise StateError(
                f"{key}: expected {expected.numel} elements of {expected.dtype}, found {tensor.numel()} of "
                f"{tensor.dtype}"
            )
        view = memory_of(tensor)
        for number, nbytes in self.spans(key):
            self.write_span(key, number, view[number * SPAN_BYTES : number * SPAN_BYTES + nbytes])

    def _span_bytes(self, key: str, number: int) -> int:
        return min(SPAN_BYTES, self._slices[key].nbytes - number * SPAN_BYTES)

    def finish(self) -> WrittenFile:
        """Waits until the drive has the file and returns its contents. Its name is not safe before the folder is
        synchronised."""
        tensors = {}
        for key, each in self._slices.items():
            found = tuple(value for value in self._checksums[key] if value is not None)
            if len(found) < len(self._checksums[key]):
                raise StateError(
                    f"{self.path.name}: {len(self._checksums[key]) - len(found)} spans of {key} were never written"
                )
            pieces = (Piece(self.path.name, each.start, each.numel, self._offsets[key], found),) if each.numel else ()
            tensors[key] = SavedTensor(dtype_name(each.dtype), each.shape, each.order, each.block_numel, pieces)
        self._checking.shutdown()
        self._file.sync()
        self._file.drop_cache()
        self._file.close()
        return WrittenFile(self.path.name, self.nbytes, tensors)

    def abandon(self) -> None:
        """Closes and removes the file, as far as that is possible."""
        self._checking.shutdown()
        with contextlib.suppress(FileError):
            self._file.close()
        with contextlib.suppress(FileError):
            self._files.remove(self.path, missing_ok=True)


def slice_header(slices: Iterable[Slice]) -> bytes:
    """The first bytes of a file whose data are `slices`, in their order; slices without elements are left out."""
    there = [each for each in slices if each.numel]
    info = json.dumps({each.key: {"saved_offsets": [each.start]} for each in there})
    entries = {each.key: (each.dtype, (each.numel,)) for each in there}
    return safetensors_header(entries, {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info})


def safetensors_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Length and header of a safetensors file whose data follow each other without holes.

    Raises:
        InputError: the header is longer than readers take.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for key, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_MULTIPLE_BYTES)
    if len(text) > LARGEST_HEADER_BYTES:
        raise InputError(
            f"names of {len(tensors)} tensors take {len(text)} bytes, and readers of safetensors accept at most "
            f"{LARGEST_HEADER_BYTES}: shorten them, or save with more ranks"
        )
    return len(text).to_bytes(8, "little") + text


def header_in_index(name: str, tensors: Mapping[str, SavedTensor]) -> bytes:
    """The header that the file `name` must have, from the entries of an index."""
    there = []
    for key, tensor in tensors.items():
        there += [
            (piece.offset, Slice(key, tensor.shape, tensor.torch_dtype, piece.start, piece.numel))
            for piece in tensor.pieces
            if piece.file == name
        ]
    return slice_header(each for _, each in sorted(there, key=lambda pair: pair[0]))
