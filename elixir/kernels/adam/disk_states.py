"""States of a `HybridAdam` that live on a disk, without a plan: read ahead of their step, and written after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from elixir.errors import DiskError, FileError, InputError, InputTypeError
from elixir.extents import Extent, ExtentFile, whole_blocks
from elixir.files import PathLike, aligned_buffer

WINDOW = 3
"""Parameters whose states are in memory at once: one is stepped, one is read, one is written."""
_T = TypeVar("_T")


class _Part(NamedTuple):
    """A state tensor in an extent."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class DiskStates:
    """States of some parameters, in a file without a name.

    Args:
        folder: on the disk.
        parameters: whose states live there; all in host memory.
        states: the states of an optimizer; those of `parameters` have their tensors only while they are stepped.
    """

    def __init__(
        self, folder: PathLike, parameters: Sequence[nn.Parameter], states: MutableMapping[Any, dict[str, Any]]
    ) -> None:
        self.parameters = frozenset(parameters)
        self._states = states
        self._file = ExtentFile([folder])
        self._lane = ThreadPoolExecutor(1, "elixir disk")
        self._extents: dict[nn.Parameter, Extent] = {}
        self._parts: dict[nn.Parameter, dict[str, _Part]] = {}
        self._memory = [memoryview(b"")] * WINDOW

    def in_turn(self, items: Sequence[_T], parameters: Sequence[nn.Parameter]) -> Iterator[_T]:
        """Each of `items` while the states of its parameter are in memory, and may be changed.

        Raises:
            DiskError: the disk has failed.
        """
        reads: dict[int, Future[None]] = {}
        writes: list[Future[None]] = []
        try:
            for turn, (item, parameter) in enumerate(zip(items, parameters, strict=True)):
                # The one lane works in this order, so it has written what a buffer held before it reads into it.
                for ahead in range(turn, min(turn + WINDOW - 1, len(items))):
                    if ahead not in reads:
                        reads[ahead] = self._lane.submit(self._read, parameters[ahead], ahead % WINDOW)
                reads[turn].result()
                self._show(parameter, self._memory[turn % WINDOW])
                yield item
                self._take(parameter, turn % WINDOW)
                writes.append(self._lane.submit(self._write, parameter, turn % WINDOW))
            for write in writes:
                write.result()
        except FileError as error:
            raise DiskError(error, "a HybridAdam") from error

    def values(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The states of a parameter in separate memory; none before its first step."""
        if parameter not in self._extents:
            return {}
        extent = self._extents[parameter]
        memory = memoryview(aligned_buffer(extent.nbytes))[: extent.nbytes]
        self._file.read(extent, memory)
        return {name: _view(memory, part) for name, part in self._parts[parameter].items()}

    def use(self, states: MutableMapping[Any, dict[str, Any]]) -> None:
        """Go on from other states: those of the parameters here are in memory now, and then on the disk only."""
        self._states = states
        for parameter in [parameter for parameter in states if parameter in self.parameters]:
            self._take(parameter, 0)
            self._write(parameter, 0)

    def _room(self, turn: int, nbytes: int) -> memoryview:
        if len(self._memory[turn]) < nbytes:
            self._memory[turn] = memoryview(aligned_buffer(nbytes))
        return self._memory[turn]

    def _read(self, parameter: nn.Parameter, turn: int) -> None:
        extent = self._extents.get(parameter)
        if extent is not None:
            self._file.read(extent, self._room(turn, extent.nbytes)[: extent.nbytes])

    def _write(self, parameter: nn.Parameter, turn: int) -> None:
        extent = self._extents.get(parameter)
        if extent is not None:
            self._file.write(extent, self._memory[turn][: extent.nbytes])

    def _show(self, parameter: nn.Parameter, memory: memoryview) -> None:
        for name, part in self._parts.get(parameter, {}).items():
            self._states[parameter][name] = _view(memory, part)

    def _take(self, parameter: nn.Parameter, turn: int) -> None:
        """The tensors of a state lie in a buffer from here on; the state keeps tensors without memory."""
        state = self._states[parameter]
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
        parts, end = {}, 0
        for name, value in tensors.items():
            start = -(-end // value.itemsize) * value.itemsize
            parts[name] = _Part(start, value.dtype, tuple(value.shape), value.stride())
            end = start + value.nbytes
        if parts != self._parts.get(parameter):
            if parameter in self._extents:
                self._file.give_back(self._extents.pop(parameter))
            self._parts[parameter] = parts
            self._extents[parameter] = self._file.extent(end)
        memory = self._room(turn, whole_blocks(end))
        for name, value in tensors.items():
            place = _view(memory, parts[name])
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
            nothing = torch.full((1,), math.nan if value.is_floating_point() else 0, dtype=value.dtype, device="cpu")
            state[name] = nothing.as_strided(value.shape, (0,) * value.dim())


def chosen(parameters: Iterable[nn.Parameter], fraction: float) -> list[nn.Parameter]:
    """Parameters in host memory, from the first on, with this part of all elements of such."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise InputTypeError(f"nvme_offload_fraction must be a number, got {fraction!r}")
    if not 0 <= fraction <= 1:
        raise InputError(f"nvme_offload_fraction must be from 0 to 1, got {fraction}")
    here = [parameter for parameter in parameters if parameter.device.type == "cpu" and parameter.numel()]
    left = fraction * sum(parameter.numel() for parameter in here)
    found = []
    for parameter in here:
        if left < parameter.numel():
            break
        left -= parameter.numel()
        found.append(parameter)
    return found


def _view(memory: memoryview, part: _Part) -> torch.Tensor:
    numel = math.prod(part.shape)
    flat = torch.frombuffer(memory, dtype=part.dtype, count=numel, offset=part.start)
    return flat.as_strided(part.shape, part.stride)
