"""Tensors of a checkpoint: how each is cut into pieces, which file a piece lies in, and the checksums of its spans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from elixir.errors import InputError
from elixir.memory_order import Order
from elixir.units import MIB, dtype_name

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
