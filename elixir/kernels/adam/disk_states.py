"""States of a `HybridAdam` that live on a disk, without a plan: read for their step, and written during the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.extents.extent_file import ExtentFile
from elixir.extents.stored_tensors import StoredTensors, TensorFile, paged_memory
from elixir.files import PathLike


class DiskStates:
    """States of some parameters, in a file without a name.

    Args:
        folder: on the disk.
        parameters: whose states live there; all in host memory.
        states: the states of an optimizer. Those of `parameters` are in memory until `put_away`, and then only inside
            of `in_turn`.
    """

    def __init__(
        self, folder: PathLike, parameters: Sequence[nn.Parameter], states: MutableMapping[Any, dict[str, Any]]
    ) -> None:
        file = ExtentFile([folder])  # it is closed with its last reference
        self.folder, self.parameters = folder, dict.fromkeys(parameters)
        self._states, self._file = states, TensorFile(lambda: file)
        self._stored: dict[nn.Parameter, StoredTensors] = {}

    def put_away(self) -> None:
        """Writes all states that there are. Raises as `in_turn`; nothing can be read any more then."""
        self.in_turn([parameter for parameter in self.parameters if parameter in self._states], lambda parameter: None)

    def in_turn(
        self, parameters: Sequence[nn.Parameter], work: Callable[[nn.Parameter], object], *, write: bool = True
    ) -> None:
        """Calls `work` for each parameter while its states are in memory; with `write` it may change them, or make them
        if there are none. While one is read and stepped, the one before is written.

        Raises:
            DiskError: the disk has failed, now or before.
        """
        if self._file.lost is not None:
            raise self._file.lost
        writes: list[Future[None]] = []
        with ThreadPoolExecutor(1, "elixir disk") as lane:  # which has written all when it ends
            for parameter in parameters:
                stored, store = self._stored.get(parameter), None
                memory = paged_memory(0 if stored is None else stored.nbytes)
                if stored is not None:
                    stored.fill(memory)
                    stored.bind(memory)
                try:
                    work(parameter)
                    store = self._kept(parameter, memory) if write else None
                finally:
                    if store is None and stored is not None:
                        stored.put_away()
                wait(writes[-1:])
                if store is not None:
                    writes.append(lane.submit(store))
        for written in writes:
            written.result()

    def _kept(self, parameter: nn.Parameter, memory: torch.Tensor) -> Callable[[], None] | None:
        """A function that writes a state from memory to its place, which is new if its tensors are; None without."""
        values = self._states[parameter].items()
        tensors = {name: value for name, value in values if isinstance(value, torch.Tensor) and value.dim()}
        stored = self._stored.pop(parameter, None)
        if stored is None or list(map(id, tensors.values())) != list(map(id, stored.tensors)):
            if stored is not None:
                stored.give_back()
            if not tensors:
                return None
            # Each tensor begins at a multiple of its itemsize.
            nbytes = sum(value.nbytes + value.itemsize for value in tensors.values())
            stored = StoredTensors(self._file, "a HybridAdam", nbytes)
            memory = paged_memory(stored.nbytes)
            stored.bind(memory)
            for name, value in tensors.items():
                order = value.stride()
                stored.region(name, value.numel(), value.dtype).as_strided(value.shape, order).copy_(value)
                stored.show(None, value, name, stride=order)
        self._stored[parameter] = stored
        return partial(stored.store, memory)


def chosen(parameters: Iterable[nn.Parameter], fraction: float) -> list[nn.Parameter]:
    """The first parameters in host memory that together have this part of its elements."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise InputTypeError(f"nvme_offload_fraction must be a number, got {fraction!r}")
    if not 0 <= fraction <= 1:
        raise InputError(f"nvme_offload_fraction must be from 0 to 1, got {fraction}")
    here = [parameter for parameter in parameters if parameter.device.type == "cpu" and parameter.numel()]
    ends = [*accumulate(parameter.numel() for parameter in here)]
    return [parameter for parameter, end in zip(here, ends, strict=True) if end <= fraction * ends[-1]]
