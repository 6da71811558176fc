"""`HostMover`: copies activations to pinned host memory and back, on the lanes of gradients and weights.

Out they go on `offload`, back on `fetch`: each direction of the link has one order, so that a copy of activations never
overtakes weights or gradients that were asked for before, nor holds up those that it comes after. The simulator replays
the same order (`elixir.search.simulator.replay`).
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch

from elixir.chunk.host_buffers import SWAPPED, HostBuffers
from elixir.chunk.lanes import Lanes
from elixir.chunk.memory import Memory


class HostMover:
    """Moves flat tensors of one rank.

    Args:
        lanes: make the copies.
        buffers: hold what is on the host.
    """

    def __init__(self, lanes: Lanes, buffers: HostBuffers) -> None:
        self._lanes, self.buffers = lanes, buffers

    def send(self, tensor: torch.Tensor) -> SentTensor:
        """Begins to copy a flat tensor to the host. It must not be written to before `SentTensor.arrived`."""
        self._lanes.counts.device_to_host_bytes += tensor.nbytes
        return SentTensor(self, self._lanes, tensor)


class SentTensor:
    """A flat tensor that moves to the host; its buffer is free when nothing refers to this."""

    def __init__(self, mover: HostMover, lanes: Lanes, tensor: torch.Tensor) -> None:
        self._mover, self._lanes = mover, lanes
        self._numel, self._dtype, self._device = tensor.numel(), tensor.dtype, tensor.device
        self._buffer = buffer = mover.buffers.lend(SWAPPED, tensor.nbytes)
        host = buffer.view(self._numel, self._dtype)
        # The caller holds the tensor, and with it the device's memory, until `arrived`.
        work = partial(host.copy_, tensor, non_blocking=True)
        lanes.offload.submit(work, writes=[buffer], nbytes=tensor.nbytes)
        self._here: Memory | None = None

    def arrived(self) -> None:
        """Lets compute wait until it is on the host."""
        self._buffer.wait()  # compute that is submitted next may get the memory that the copy reads

    def fetch(self) -> None:
        """Begins to bring it back, unless it is on the device."""
        if self._here is None:
            self._here = self._begun()

    def tensor(self) -> torch.Tensor:
        """The tensor on the device; compute waits until it is there."""
        here = self._here = self._begun() if self._here is None else self._here
        here.wait(taking=True)  # compute reads what the copy writes
        return here.tensor

    def _begun(self) -> Memory:
        here = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        memory, host = Memory(here), self._buffer.view(self._numel, self._dtype)
        self._lanes.counts.host_to_device_bytes += here.nbytes
        work = partial(here.copy_, host, non_blocking=True)
        self._lanes.fetch.submit(work, reads=[self._buffer], writes=[memory], nbytes=here.nbytes)
        return memory

    def forget(self) -> None:
        """Lets go of the device memory, until the tensor is asked for again."""
        if self._here is not None:
            self._here.wait(taking=True)  # the device gets memory back that the copy may still write to
            self._here = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # of work that failed, which was reported where it was waited for
            self.forget()
        self._mover.buffers.give_back(SWAPPED, self._buffer)
