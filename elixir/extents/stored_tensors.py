"""Tensors that live in an extent on a disk, and have memory only while a buffer holds the extent.

At other times they have their shape and dtype, and no memory: a read gives NaN, a write raises. A caller reads the
extent into a buffer (`StoredTensors.fill`), makes the tensors views of it (`bind`), changes them, and writes it back
(`store`) or leaves the extent as it was (`put_away`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from errno import EIO

import torch

from elixir.errors import DiskError, FileError, StateError
from elixir.extents.extent_file import Extent, ExtentFile, whole_blocks
from elixir.files import DIRECT_BYTES, aligned_buffer

logger = logging.getLogger(__name__)


class TensorFile:
    """The file that has the extents, and its first failure.

    Args:
        open_file: makes the file when the first extent is asked for.
        count: is given the bytes of each new extent, and minus those of each that is given back.
        failed: is given the first error.
    """

    def __init__(
        self,
        open_file: Callable[[], ExtentFile],
        count: Callable[[int], None] | None = None,
        failed: Callable[[DiskError], None] | None = None,
    ) -> None:
        self._open, self._count, self._tell = open_file, count, failed
        self._file: ExtentFile | None = None
        self.lost: DiskError | None = None
        """The first error of the disk, after which no step is made."""
        self._left: str | None = None

    def new_extent(self, nbytes: int, name: str) -> Extent:
        """Takes room on the disk; `DiskError` if it has none."""
        try:
            if self._file is None:
                self._file = self._open()
            extent = self._file.extent(nbytes)
        except FileError as error:
            raise self._failed(error, name) from error
        if self._count is not None:
            self._count(extent.nbytes)
        return extent

    def give_back(self, extent: Extent) -> None:
        """Gives an extent up."""
        if self._file is not None:
            self._file.give_back(extent)
        if self._count is not None:
            self._count(-extent.nbytes)

    def transfer(self, way: str, extent: Extent, memory: torch.Tensor, name: str, first: int = 0) -> None:
        """Moves bytes between an extent and page-aligned memory; `DiskError` where the disk fails."""
        if self._file is None:
            raise StateError("states are moved before there is a file")
        view: memoryview = memory.numpy().data
        try:
            (self._file.read if way == "read" else self._file.write)(extent, view, first)
        except FileError as error:
            raise self._failed(error, name) from error
        except Exception as error:  # such as too little memory, or no more threads: what was moved is not known
            text = f"{type(error).__name__}: {error}"
            raise self._failed(FileError(EIO, text, self._file.paths, way), name) from error

    def _failed(self, error: FileError, name: str) -> DiskError:
        if self._left is not None:
            return DiskError(error, name, self._left)
        found = DiskError(error, name)
        if self.lost is None:
            self.lost = found
            logger.error("%s", found)
            if self._tell is not None:
                self._tell(found)
        return found

    @contextlib.contextmanager
    def without_loss(self, then: str) -> Iterator[None]:
        """Treats errors as harmless while this lasts, since what is written has a copy; `then` says what is left."""
        before, self._left = self._left, then
        try:
            yield
        finally:
            self._left = before

    def close(self) -> None:
        """Gives the file back; nothing may be under way."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


@dataclass(frozen=True)
class _Region:
    """A part of an extent: one flat tensor."""

    start: int
    """First byte in the extent."""
    numel: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.numel * self.dtype.itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in memory that holds the extent."""
        return memory[self.start : self.end].view(self.dtype)


@dataclass(frozen=True)
class _View:
    """A tensor that lies in a region while the extent is in memory."""

    tensor: torch.Tensor
    region: str
    first: int
    """First element of the tensor in the region."""
    owner: object
    stride: tuple[int, ...] | None = None
    """None: it is contiguous."""


class StoredTensors:
    """The tensors of one extent.

    Args:
        file: has the extent.
        name: what the tensors belong to, for errors.
        nbytes: size of the extent.
    """

    def __init__(self, file: TensorFile, name: str, nbytes: int) -> None:
        self.name = name
        self._file = file
        self._extent = file.new_extent(nbytes, name)
        self._written_bytes = 0
        """The extent holds zeros from this byte on."""
        self._regions: dict[str, _Region] = {}
        self._views: list[_View] = []
        self._memory: torch.Tensor | None = None
        self._changed = False
        self._begun = False
        """Whether the extent is being written, so that a failure leaves neither the old states nor the new."""

    @property
    def nbytes(self) -> int:
        """Bytes of the extent, or of the tensors, if these need a larger one, which `store` makes."""
        return max(self._extent.nbytes, self.used_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes that a transfer of all regions moves."""
        return whole_blocks(max((region.end for region in self._regions.values()), default=0))

    # --- regions and the tensors in them ---------------------------------------------------------------------------

    def region(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a flat tensor of the extent, zero if it is new; a view of the buffer, if one holds the extent.

        Args:
            name: of the region.
            numel: its elements.
            dtype: of each; a region that is there has the same.
        """
        if name not in self._regions:
            end = max((region.end for region in self._regions.values()), default=0)
            start = -(-end // dtype.itemsize) * dtype.itemsize
            self._regions[name] = found = _Region(start, numel, dtype)
            if self._memory is not None and found.end > self._memory.nbytes:
                self._enlarge()
            if self._memory is not None:
                self._memory[found.start : found.end].zero_()
                self._changed |= start < self._written_bytes
        region = self._regions[name]
        if (region.numel, region.dtype) != (numel, dtype):
            raise StateError(f"{self.name}: '{name}' has {region.numel} x {region.dtype}, asked for {numel} x {dtype}")
        return _nowhere((numel,), dtype) if self._memory is None else region.of(self._memory)

    def show(
        self,
        owner: object,
        tensor: torch.Tensor,
        name: str,
        first: int = 0,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        """Lets a tensor show a part of a region whenever the extent is in memory.

        Args:
            owner: for `forget`.
            tensor: its shape and dtype stay.
            name: of the region.
            first: its first element there.
            stride: of a dense tensor; None: it is contiguous.
        """
        self._views.append(_View(tensor, name, first, owner, stride))
        if self._memory is None:
            tensor.data = _nowhere(tensor.shape, tensor.dtype)
        else:
            tensor.data = self._part(self._views[-1], self._memory)

    def _part(self, view: _View, memory: torch.Tensor) -> torch.Tensor:
        region = self._regions[view.region].of(memory)
        part = region[view.first : view.first + view.tensor.numel()]
        return part.view(view.tensor.shape) if view.stride is None else part.as_strided(view.tensor.shape, view.stride)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that lie here, in the order in which they came."""
        return [view.tensor for view in self._views]

    def forget(self, owner: object) -> None:
        """Forgets the tensors of an owner."""
        self._views = [view for view in self._views if view.owner is not owner]

    def bind(self, memory: torch.Tensor) -> None:
        """Makes the tensors views of memory into which `fill` has read the extent."""
        self._memory = memory
        for view in self._views:
            view.tensor.data = self._part(view, memory)

    def put_away(self) -> None:
        """Takes their memory from the tensors; the extent stays as it was."""
        self._memory = None
        for view in self._views:
            view.tensor.data = _nowhere(view.tensor.shape, view.tensor.dtype)

    def _enlarge(self) -> None:
        """Makes the memory that holds the extent as large as the tensors need."""
        held = 0 if self._memory is None else self._memory.nbytes
        raise StateError(f"{self.name} is in {held} bytes of memory, its tensors need {self.nbytes}")

    # --- transfers -------------------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes that reading all of them moves: what was never written is zero."""
        return min(self.used_bytes, self._written_bytes)

    def fill(self, memory: torch.Tensor) -> None:
        """Reads the extent into a buffer."""
        self._refuse_begun()
        kept, used = self.kept_bytes, self.used_bytes
        if kept:
            self._file.transfer("read", self._extent, memory[:kept], self.name)
        memory[kept:used].zero_()

    def store(self, memory: torch.Tensor) -> None:
        """Writes what a step has left in the buffer to the extent."""
        used, extent = self.used_bytes, self._extent
        try:
            if used > extent.nbytes:  # states that no plan has foreseen; the old ones stay until these are written
                extent = self._file.new_extent(used, self.name)
            self._begun = extent is self._extent
            self._file.transfer("write", extent, memory[:used], self.name)
            if extent is not self._extent:
                self._file.give_back(self._extent)
                self._extent = extent
            self._begun = self._changed = False
        finally:
            self.put_away()
        self._written_bytes = max(self._written_bytes, used)

    def read(self, name: str, first: int, stop: int) -> torch.Tensor:
        """Reads elements of a region into separate memory, straight from the disk, for a reader that has no buffer.

        Nothing may write the extent meanwhile.
        """
        self._refuse_begun()
        region = self._regions[name]
        size = region.dtype.itemsize
        begin, end = region.start + first * size, region.start + stop * size
        aligned = begin // DIRECT_BYTES * DIRECT_BYTES
        memory = paged_memory(whole_blocks(end - aligned))
        self._file.transfer("read", self._extent, memory, self.name, aligned)
        return memory[begin - aligned : end - aligned].view(region.dtype)

    def give_back(self) -> None:
        """Gives the extent up."""
        self._views.clear()
        self._file.give_back(self._extent)

    def _refuse_begun(self) -> None:
        """Raises if a write of the extent has failed, so that nobody takes a part of it for the whole."""
        if self._begun and self._file.lost is not None:
            raise self._file.lost


def paged_memory(nbytes: int) -> torch.Tensor:
    """Makes memory that direct transfers take, rounded up to whole blocks."""
    return torch.frombuffer(aligned_buffer(nbytes), dtype=torch.uint8)


def _nowhere(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory: reads give NaN, or the largest number of the dtype; writes raise."""
    value = math.nan if dtype.is_floating_point else 1 if dtype is torch.bool else torch.iinfo(dtype).max
    return torch.full((1,), value, dtype=dtype, device="cpu").as_strided(tuple(shape), (0,) * len(shape))
