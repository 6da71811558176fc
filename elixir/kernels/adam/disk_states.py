"""States of a `HybridAdam` that live on a disk, without a plan: read ahead of their step, and written after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.extents.extent_file import ExtentFile
from elixir.extents.stored_tensors import StoredTensors, TensorFile, paged_memory
from elixir.files import PathLike

WINDOW = 3
"""Parameters whose states are in memory at once: one is stepped, one is read, one is written."""


class DiskStates:
    """States of some parameters, in a file without a name.

    Args:
        folder: on the disk.
        parameters: whose states live there; all in host memory.
        states: the states of an optimizer; those of `parameters` have their tensors only inside of `in_turn`.
    """

    def __init__(
        self, folder: PathLike, parameters: Sequence[nn.Parameter], states: MutableMapping[Any, dict[str, Any]]
    ) -> None:
        self.parameters = dict.fromkeys(parameters)
        self._folder = folder
        self._lane = ThreadPoolExecutor(1, "elixir disk")
        self._memory = [paged_memory(0) for _ in range(WINDOW)]
        self.use(states)

    def use(self, states: MutableMapping[Any, dict[str, Any]]) -> None:
        """Goes on from other states: those of the parameters here are in memory now, and then on the disk only."""
        file = ExtentFile([self._folder])  # the file before is closed with its last reference, below
        self._states, self._file = states, TensorFile(lambda: file)
        self._stored: dict[nn.Parameter, StoredTensors] = {}
        self.in_turn([parameter for parameter in self.parameters if parameter in states], lambda parameter: None)

    def in_turn(
        self, parameters: Sequence[nn.Parameter], work: Callable[[nn.Parameter], object], *, write: bool = True
    ) -> None:
        """Calls `work` for each parameter while its states are in memory; with `write` it may change them, or make them
        if there are none.

        Raises:
            DiskError: the disk has failed, now or before.
        """
        if write and self._file.lost is not None:
            raise self._file.lost
        reads: list[Future[None]] = []
        writes: list[Future[None]] = []
        try:
            for turn, parameter in enumerate(parameters):
                # The one lane works in this order, so it has written what a buffer held before it reads into it.
                for ahead in parameters[len(reads) : turn + WINDOW - 1]:
                    reads.append(self._lane.submit(self._read, ahead, len(reads) % WINDOW))
                reads[turn].result()
                stored, changed = self._stored.get(parameter), False
                if stored is not None:
                    stored.bind(self._memory[turn % WINDOW])
                try:
                    work(parameter)
                    stored = self._kept(parameter, turn % WINDOW) if write else stored
                    changed = write
                finally:
                    if stored is not None and not changed:
                        stored.put_away()
                if stored is not None and changed:
                    writes.append(self._lane.submit(stored.store, self._memory[turn % WINDOW]))
        finally:
            wait([*reads, *writes])  # the caller may close the file next, or call this again
        for written in writes:
            written.result()

    def _read(self, parameter: nn.Parameter, slot: int) -> None:
        if parameter in self._stored:
            self._stored[parameter].fill(self._room(slot, self._stored[parameter].nbytes))

    def _kept(self, parameter: nn.Parameter, slot: int) -> StoredTensors | None:
        """The place of a state, whose tensors are moved into the buffer if they are not there yet; None without any."""
        values = self._states[parameter].items()
        tensors = {name: value for name, value in values if isinstance(value, torch.Tensor) and value.dim()}
        before = self._stored.get(parameter)
        if before is not None:
            if list(map(id, tensors.values())) == list(map(id, before.tensors)):
                return before
            for value in tensors.values():
                value.data = value.clone()  # the tensors lie in a buffer that other states will fill
            self._stored.pop(parameter).give_back()
        if not tensors:
            return None
        # Each tensor begins at a multiple of its itemsize.
        nbytes = sum(value.nbytes + value.itemsize for value in tensors.values())
        self._stored[parameter] = stored = StoredTensors(self._file, "a HybridAdam", nbytes)
        stored.bind(self._room(slot, stored.nbytes))
        for name, value in tensors.items():
            order = value.stride()
            stored.region(name, value.numel(), value.dtype).as_strided(value.shape, order).copy_(value)
            stored.show(self, value, name, stride=order)
        return stored

    def _room(self, slot: int, nbytes: int) -> torch.Tensor:
        if self._memory[slot].nbytes < nbytes:
            self._memory[slot] = paged_memory(nbytes)
        return self._memory[slot]


def chosen(parameters: Iterable[nn.Parameter], fraction: float) -> list[nn.Parameter]:
    """The first parameters in host memory that together have this part of its elements."""
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
