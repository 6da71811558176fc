"""`SliceReader`: reads any range of any tensor of a checkpoint, span by span, and checks every span that it touches;
`SavedCheckpoint`: shows what a checkpoint holds."""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from elixir.checkpoint_format.folders import read_index
from elixir.checkpoint_format.index import INDEX_NAME, Index, decode, scale_key
from elixir.checkpoint_format.slices import (
    SPAN_BYTES,
    STORED_DTYPES,
    Piece,
    SavedTensor,
    checksum,
    header_in_index,
    memory_of,
    scalar_state,
    span_count,
)
from elixir.errors import CheckpointCorrupt, CheckpointError, FileError, InputError, unknown_name
from elixir.files import FILES, File, Files, PathLike
from elixir.memory_order import shaped
from elixir.optimizer_states import decode_signed, decode_unsigned
from elixir.units import parse_dtype

T = TypeVar("T", bound="SliceReader")

OPEN_FILES = 16
"""Files kept open at once: a checkpoint of thousands of ranks must not use up the handles of a process."""
READING_THREADS = 4
"""Threads that read and check spans. One waits for the drive while others check what they have read."""


class SliceReader:
    """Reads tensors of one checkpoint, by one thread at a time. Memory next to what is asked for: one span.

    Args:
        folder: of the checkpoint.
        index: of it, where it is known already.
        files: the operations it uses.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        CheckpointCorrupt: the index is damaged.
    """

    def __init__(self, folder: PathLike, index: Index | None = None, *, files: Files = FILES) -> None:
        self.folder, self._files = Path(folder), files
        self.index = index if index is not None else read_index(folder, files=files)
        self._open: OrderedDict[str, File] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._batch: list[Callable[[], None]] = []
        """Reads of small spans, which one thread gets together: handing one over costs as much as reading 100 KB."""
        self._batch_bytes = 0
        self._begun: list[Future[None]] = []
        self._starts: dict[str, list[int]] = {}

    def tensor(self, key: str) -> SavedTensor:
        """Returns the entry of a tensor; `CheckpointError` if it has none."""
        found = self.index.tensors.get(key)
        if found is None:
            count = len(self.index.tensors)
            raise CheckpointError(f"{self.folder} holds no {key!r}; it has {count} tensors, see keys()")
        return found

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements `start` to `stop` of the flattened tensor, in host memory and in the order in which they are saved
        (`SavedTensor.order`)."""
        saved, stop = self.in_range(key, start, stop)
        out = torch.empty(stop - start, dtype=saved.torch_dtype, device="cpu")
        self.read_into(key, start, out)
        return out

    def in_range(self, key: str, start: int, stop: int | None) -> tuple[SavedTensor, int]:
        """Returns the entry of a tensor, and `stop` or its end; `InputError` for a range outside of it."""
        saved = self.tensor(key)
        stop = saved.numel if stop is None else stop
        if not 0 <= start <= stop <= saved.numel:
            raise InputError(f"{key} has {saved.numel} elements, asked for {start} to {stop}")
        return saved, stop

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fills a contiguous tensor in host memory with the elements from `start` on; see `begin_to_read`."""
        try:
            self.begin_to_read(key, start, out)
        finally:
            self.finish()

    def begin_to_read(self, key: str, start: int, out: torch.Tensor) -> None:
        """Starts to fill a contiguous tensor in host memory with the elements from `start` on; `finish` ends it.

        After an error `out` may hold anything. `finish` raises what this does not.

        Raises:
            CheckpointCorrupt: a span that is touched does not have its checksum, or its file is too short or missing.
        """
        saved = self.tensor(key)
        if out.dtype != saved.torch_dtype or start < 0 or start + out.numel() > saved.numel:
            raise InputError(
                f"{key} has {saved.numel} elements of {saved.dtype}, asked for {start} to {start + out.numel()} of "
                f"{out.dtype}"
            )
        view, stop, size = memory_of(out), start + out.numel(), saved.itemsize
        for piece in self._pieces(key, saved, start, stop):
            low, high = max(start, piece.start), min(stop, piece.stop)
            first, last = (low - piece.start) * size, (high - piece.start) * size
            for number in range(first // SPAN_BYTES, span_count(last)):
                begin = number * SPAN_BYTES
                nbytes = min(SPAN_BYTES, piece.numel * size - begin)
                a, b = max(first, begin), min(last, begin + nbytes)
                at = (low - start) * size + a - first
                target = view[at : at + b - a]
                file = self._file(piece.file)
                if b - a < nbytes:
                    scratch = memoryview(self._scratch)[:nbytes]
                    self._read_span(file, key, piece, number, scratch)
                    target[:] = scratch[a - begin : b - begin]
                    continue
                self._batch.append(partial(self._read_span, file, key, piece, number, target))
                self._batch_bytes += nbytes
                if self._batch_bytes >= SPAN_BYTES:
                    self._send()

    def finish(self) -> None:
        """Reads what is left, and waits for all that `begin_to_read` has begun; raises what went wrong first."""
        batch, begun = self._take_batch(), self._begun
        self._begun = []
        try:
            _run_all(batch)
        finally:
            wait(begun)  # the threads write to the callers' tensors
            for each in begun:
                each.result()

    def _send(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READING_THREADS, "elixir load")
        self._begun.append(self._pool.submit(_run_all, self._take_batch()))

    def _take_batch(self) -> list[Callable[[], None]]:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        return batch

    def _pieces(self, key: str, saved: SavedTensor, start: int, stop: int) -> tuple[Piece, ...]:
        if start == stop:
            return ()
        starts = self._starts.setdefault(key, [piece.start for piece in saved.pieces])
        return saved.pieces[bisect_right(starts, start) - 1 : bisect_left(starts, stop)]

    def _read_span(self, file: File, key: str, piece: Piece, number: int, view: memoryview) -> None:
        """Reads and checks one whole span."""
        offset, nbytes = piece.offset + number * SPAN_BYTES, len(view)
        try:
            count = file.read_into(view, offset)
        except FileError as error:
            raise CheckpointError(f"{key} cannot be read: {error}") from error
        if count < nbytes:
            problem = f"ends at byte {offset + count}, expected {offset + nbytes}"
        elif checksum(view) != piece.checksums[number]:
            problem = f"wrong checksum of bytes {offset} to {offset + nbytes}"
        else:
            return
        raise CheckpointCorrupt(problem, path=self.folder / piece.file, key=key)

    @cached_property
    def _scratch(self) -> bytearray:
        """Takes a span of which only a part is wanted."""
        return bytearray(SPAN_BYTES)

    def _file(self, name: str) -> File:
        """Opens a file of the checkpoint; `CheckpointCorrupt` if it is missing or of another size."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        self.check_file(name)
        if len(self._open) >= OPEN_FILES:
            if self._batch:
                self._send()
            wait(self._begun)  # a thread may read the file that is closed
            self._begun = [each for each in self._begun if each.exception() is not None]
        while len(self._open) >= OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        try:
            self._open[name] = self._files.open(self.folder / name)
        except FileError as error:
            raise CheckpointError(str(error)) from error
        return self._open[name]

    def check_file(self, name: str) -> None:
        """`CheckpointCorrupt` where a file that the index names is missing, no file, or of another size."""
        path, expected = self.folder / name, self.index.files[name]
        try:
            size = self._files.size(path)
        except FileError as error:
            if error.errno in (errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.ENOTDIR):
                problem = "missing" if error.errno == errno.ENOENT else error.strerror
                raise CheckpointCorrupt(f"{problem}; the index says it has {expected} bytes", path=path) from None
            raise CheckpointError(str(error)) from error
        if size != expected:
            raise CheckpointCorrupt(f"has {size} bytes, the index says {expected}", path=path)

    def problems(self) -> Iterator[CheckpointError]:
        """Reads everything and yields an error for every file, header and span that is not what the index says."""
        whole = set()
        for name in self.index.files:
            try:
                self._check_header(name)
                whole.add(name)
            except CheckpointError as error:
                yield error
        for key, saved in self.index.tensors.items():
            for piece in saved.pieces:
                if piece.file not in whole:
                    continue
                nbytes = piece.numel * saved.itemsize
                for number in range(span_count(nbytes)):
                    view = memoryview(self._scratch)[: min(SPAN_BYTES, nbytes - number * SPAN_BYTES)]
                    try:
                        self._read_span(self._file(piece.file), key, piece, number, view)
                    except CheckpointError as error:
                        yield error

    def _check_header(self, name: str) -> None:
        expected = header_in_index(name, self.index.tensors)
        found = bytearray(len(expected))
        try:
            count = self._file(name).read_into(found, 0)
        except FileError as error:
            raise CheckpointError(str(error)) from error
        if count < len(found) or found != expected:
            raise CheckpointCorrupt("the header is not the one that the index describes", path=self.folder / name)

    def close(self) -> None:
        """Closes the files, once nothing reads them."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_all(batch: list[Callable[[], None]]) -> None:
    for each in batch:
        each()


def verify(folder: PathLike, *, files: Files = FILES) -> tuple[CheckpointError, ...]:
    """Reads and checks all of a checkpoint; returns what is wrong with it.

    Raises:
        CheckpointNotFound: there is no checkpoint.
    """
    try:
        with SliceReader(os.fspath(folder), files=files) as reader:
            return tuple(reader.problems())
    except CheckpointCorrupt as error:  # of the index itself
        return (error,)


# --- saved checkpoint ------------------------------------------------------------------------------------------------
# A checkpoint on disk, opened without ranks and without a model: its tensors, weights, optimizer states and values.


_SCALED = {"exp_avg": decode_signed, "exp_avg_sq": decode_unsigned}


def open_checkpoint(folder: PathLike, *, files: Files = FILES) -> SavedCheckpoint:
    """Opens the checkpoint in a folder to read from it. `close` or a ``with`` statement closes it.

    Args:
        folder: that was saved to.
        files: the file operations it uses.

    Raises:
        CheckpointNotFound: the folder holds no checkpoint.
        CheckpointCorrupt: its index is damaged, or a file that it names is missing or of another size.

    Example:
        >>> with open_checkpoint("run/step-00000500") as saved:
        ...     model.load_state_dict(saved.weights(torch.bfloat16))
    """
    saved = SavedCheckpoint(folder, files=files)
    for name in saved.index.files:
        saved.check_file(name)
    return saved


class SavedCheckpoint(SliceReader):
    """A checkpoint to read from, by one thread at a time. Nothing is held in memory but the index."""

    @property
    def step(self) -> int | None:
        """The step that the save was given."""
        return self.index.step

    def keys(self) -> tuple[str, ...]:
        """Keys of all tensors, such as ``weight/<name>`` and ``exp_avg/<name>``."""
        return tuple(self.index.tensors)

    def read_whole(self, key: str) -> torch.Tensor:
        """Reads a tensor in its shape."""
        return self._shaped(key, self.read(key))

    def _shaped(self, key: str, flat: torch.Tensor) -> torch.Tensor:
        saved = self.tensor(key)
        return shaped(flat, saved.shape, saved.order)

    def read_float32(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads elements in float32; codes of 8 bits are decoded with their scales."""
        saved, stop = self.in_range(key, start, stop)
        if saved.block_numel is None or start == stop:
            return self.read(key, start, stop).float()
        kind, size = key.partition("/")[0], saved.block_numel
        if kind not in _SCALED:
            raise CheckpointError(f"{key}: codes of {kind} are unknown to this version of Elixir")
        first, last = start // size, -(-stop // size)
        # Codes as whole blocks; the last of the tensor may be cut short, and zeros fill it up.
        origin = first * size
        codes = torch.zeros((last - first) * size, dtype=saved.torch_dtype, device="cpu")
        self.read_into(key, origin, codes[: min(saved.numel - origin, codes.numel())])
        scales = self.read(scale_key(key), first, last)
        values = _SCALED[kind](codes.view(-1, size), scales).view(-1)
        return values[start - origin : stop - origin].clone()

    def weights(self, dtype: torch.dtype | str | None = None) -> Mapping[str, torch.Tensor]:
        """Weights and persistent buffers by name, as a model's ``load_state_dict`` takes them; read when asked for.

        Args:
            dtype: of the floating-point weights. None: as saved, which is float32 where there were master weights.
        """
        return _Weights(self, None if dtype is None else parse_dtype(dtype))

    def optimizer_state_dict(self, optimizer: str | None = None) -> dict[str, Any]:
        """Returns the states in the layout of torch.optim: by number, in float32 or wider, in the parameter's shape,
        all in memory.

        Args:
            optimizer: the name under which it was saved; may be left out if there is one.

        Raises:
            InputError: there is no such optimizer, or several and none is named.
        """
        names = tuple(dict.fromkeys(group.optimizer for group in self.index.param_groups))
        if optimizer is None:
            if len(names) != 1:
                raise InputError(f"{self.folder} has {len(names)} optimizers, name one of {list(names)}")
            (optimizer,) = names
        if optimizer not in names:
            raise unknown_name("optimizer", optimizer, names)
        groups = [group for group in self.index.param_groups if group.optimizer == optimizer]
        numbers = {name: i for i, name in enumerate(name for group in groups for name in group.names)}
        state: dict[int, dict[str, Any]] = {}
        for name, kinds in self.index.state_kinds(numbers).items():
            for kind in kinds:
                key = f"{kind}/{name}"
                saved = self.tensor(key)
                narrow = saved.torch_dtype.is_floating_point and saved.itemsize < torch.float32.itemsize
                value = self.read_float32(key) if narrow or saved.block_numel else self.read(key)
                state.setdefault(numbers[name], {})[kind] = self._shaped(key, value)
        for name, step in self.index.steps.items():
            if name in numbers:
                state[numbers[name]] = {"step": torch.tensor(float(step), device="cpu")} | state.get(numbers[name], {})
        for name in self.index.scalars:
            if name in numbers:
                scalars = {kind: scalar_state(value) for kind, value in self.scalars(name).items()}
                state.setdefault(numbers[name], {}).update(scalars)
        found = []
        for i, group in enumerate(groups):
            options = self.mapping(group.options, f"param_groups[{i}].options")
            found.append({**options, "params": [numbers[name] for name in group.names]})
        return {"state": dict(sorted(state.items())), "param_groups": found}

    def scalars(self, name: str) -> dict[str, Any]:
        """States of a parameter that are no tensors over its elements; see `Index.scalars`."""
        key = f"scalars.{name}"
        found = self.mapping(self.index.scalars.get(name, {}), key)
        for kind, value in found.items():
            pair = type(value) is tuple and len(value) == 2 and value[0] in STORED_DTYPES
            number = value[1] if pair else value
            if not isinstance(number, (bool, int, float)):
                raise self._wrong("no number", f"{key}.{kind}")
        return found

    def value(self, name: str) -> Any:
        """A value of the user's state, such as ``epoch``."""
        if name not in self.index.values:
            raise unknown_name("saved value", name, self.index.values)
        return self.decoded(self.index.values[name], name)

    def value_names(self) -> tuple[str, ...]:
        """Names that `value` takes."""
        return tuple(self.index.values)

    def decoded(self, data: Any, key: str) -> Any:
        """Decodes a value of the index that `encode` made; `key` names it in errors."""
        return decode(data, self._stored, path=self.folder / INDEX_NAME, key=key)

    def _stored(self, key: str) -> torch.Tensor:
        if key not in self.index.tensors:
            raise self._wrong("a value names this tensor, which is not there", key)
        return self.read(key)

    def mapping(self, data: Any, key: str) -> dict[str, Any]:
        """Decodes a value that must be a dict."""
        found = self.decoded(data, key)
        if not isinstance(found, dict):
            raise self._wrong(f"expected a dict, found {type(found).__name__}", key)
        return found

    def _wrong(self, problem: str, key: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(problem, path=self.folder / INDEX_NAME, key=key)


class _Weights(Mapping[str, torch.Tensor]):
    def __init__(self, saved: SavedCheckpoint, dtype: torch.dtype | None) -> None:
        self._saved, self._dtype = saved, dtype
        index = saved.index
        kept = [key for key in index.tensors if key.startswith(("weight/", "buffer/"))]
        self._keys = {key.partition("/")[2]: key for key in kept}
        self._keys |= {other: self._keys[name] for other, name in index.aliases.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        key = self._keys[name]
        found = self._saved.read_whole(key)
        if self._dtype is None or not key.startswith("weight/") or not found.is_floating_point():
            return found
        return found.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
