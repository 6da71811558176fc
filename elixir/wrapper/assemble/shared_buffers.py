"""`SharedBuffers`: gives all ranks rank 0's buffers, such as running statistics, as DistributedDataParallel does.

Each rank's forward sees other data. If ranks kept their own writes, they would train and evaluate different models, and
a saved model would depend on the rank that saved it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn

from elixir.chunk.group import Group
from elixir.chunk.lanes import Lanes
from elixir.models.buffer_place import BufferPlace, buffer_places
from elixir.torch_private import has_internal_overlap, version_counter_kept

_ALIGNMENT = 16
"""Alignment of buffers in the message, in bytes, so that each can be read there in its own dtype."""


class SharedBuffers:
    """Copies rank 0's buffers to the other ranks.

    It follows DistributedDataParallel's rule, for the same numbers: ranks take rank 0's buffers before a forward,
    unless the last one ran without gradients. They take all buffers, since some writes go unnoticed: batch norm's
    kernel counts none, nor does code that writes through ``data``.

    Args:
        model: a model whose buffers are now the same on all ranks.
        group: the ranks.
        lanes: the lanes; it uses the network.
    """

    def __init__(self, model: nn.Module, group: Group, lanes: Lanes) -> None:
        self._model, self._group, self._lanes = model, group, lanes
        self._any = group.size > 1 and next(model.buffers(), None) is not None
        self._due = True

    def before_forward(self) -> None:
        """Takes rank 0's buffers if they are due."""
        if self._any and self._due:
            made: list[torch.Tensor] = []
            # Compute that reads or writes buffers waits for their new values.
            self._lanes.network.submit(lambda: self._take(made)).wait()
            _used_by_compute(made)

    def after_forward(self) -> None:
        """Notes the end of a forward."""
        self._due = torch.is_grad_enabled()

    def of_rank_0(self) -> dict[torch.Tensor, torch.Tensor]:
        """Rank 0's values for this rank's buffers, which stay unchanged; empty on rank 0. All ranks must call this."""
        if not self._any:
            return {}
        found: dict[str, torch.Tensor] = {}
        # The network's thread fills the dict, which is empty before.
        self._lanes.network.submit(lambda: found.update(self._receive(self._places()))).synchronize()
        _used_by_compute(found.values())
        places = self._places() if found else {}
        return {places[name].buffer: value for name, value in found.items() if name in places}

    def _take(self, made: list[torch.Tensor]) -> None:
        """Takes rank 0's values, and appends new tensors that become buffers to `made`."""
        places = self._places()
        with torch.inference_mode(False), torch.no_grad():
            for name, value in self._receive(places).items():
                made += _put(self._model, places, name, value)

    def _places(self) -> dict[str, BufferPlace]:
        """The current buffers by name, each once; forwards may register new ones."""
        first: dict[torch.Tensor, BufferPlace] = {}
        for place in buffer_places(self._model):
            first.setdefault(place.buffer, place)
        return {place.name: place for place in first.values()}

    @torch.no_grad()
    def _receive(self, places: dict[str, BufferPlace]) -> dict[str, torch.Tensor]:
        """Rank 0's values by name, on the ranks that are not rank 0."""
        answers = self._group.exchange("buffers", _digest(places))
        if any(answer != answers[0] for answer in answers) or None in answers:
            # Some rank has registered another buffer, or one of another size.
            mine = (
                {name: place.buffer.detach().cpu() for name, place in places.items()} if not self._group.rank else None
            )
            values: dict[str, torch.Tensor] = self._group.exchange("values of buffers", mine)[0]
            return values if self._group.rank else {}
        received: dict[str, torch.Tensor] = {}
        for device in dict.fromkeys(place.buffer.device for place in places.values()):
            here = {name: place.buffer for name, place in places.items() if place.buffer.device == device}
            message = torch.cat([_padded(buffer) for buffer in here.values()])
            self._group.send_from_rank_0(message)
            start = 0
            for name, buffer in here.items() if self._group.rank else ():
                received[name] = message[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
                start += _padded_bytes(buffer)
        return received


def _digest(places: dict[str, BufferPlace]) -> int | None:
    """A digest of the message with all buffers; None if some buffer cannot be part of it."""
    digest = 0
    for name, place in places.items():
        buffer = place.buffer
        if buffer.layout != torch.strided:
            return None
        said = f"{name} {tuple(buffer.shape)} {buffer.dtype} {buffer.device.type}"
        digest = zlib.crc32(said.encode(), digest)
    return digest


def _padded_bytes(buffer: torch.Tensor) -> int:
    return -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT


def _padded(buffer: torch.Tensor) -> torch.Tensor:
    flat = buffer.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return nn.functional.pad(flat, (0, _padded_bytes(buffer) - flat.numel()))


def _used_by_compute(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps memory of another stream from being reused before compute has read it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _put(model: nn.Module, places: dict[str, BufferPlace], name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """Gives a buffer rank 0's value, if possible in place, so that all its holders see it; returns new buffers."""
    place = places.get(name)
    if place is None:  # rank 0's forward has registered a buffer that this rank lacks
        prefix, _, key = name.rpartition(".")
        model.get_submodule(prefix)._buffers[key] = value
        return [value]
    own = place.buffer
    if own.shape != value.shape and not place.is_persistent:
        return []  # a cache that has grown with this rank's data; the module keeps its size elsewhere
    same = own.shape == value.shape and own.dtype == value.dtype
    if not same or own.is_inference() or {own.layout, value.layout} != {torch.strided}:
        new = value.to(own.device)
        place.put(new)
        return [new]
    if has_internal_overlap(own):  # an expanded buffer, which cannot be written to
        if torch.equal(own, value):
            return []
        new = value.clone()
        place.put(new)
        return [new]
    # As under DDP, the write does not invalidate saved tensors: there may be two forwards before one backward.
    with version_counter_kept(own):
        own.copy_(value)
    return []
