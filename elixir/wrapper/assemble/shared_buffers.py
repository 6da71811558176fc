"""`SharedBuffers`: gives all ranks rank 0's buffers, such as running statistics, as DistributedDataParallel does.

Each rank's forward sees other data. If ranks kept their own writes, they would train and evaluate different models, and
a saved model would depend on the rank that saved it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from elixir.chunk.group import Group
from elixir.chunk.lanes import Lanes
from elixir.models.model_tensors import BufferPlace, buffer_places
from elixir.torch_private import has_internal_overlap, version_counter_kept
from elixir.wrapper.assemble.agreement import refuse_different
from elixir.wrapper.assemble.weight_source import kind_of


class SharedBuffers:
    """Copies rank 0's buffers to the other ranks.

    It follows DistributedDataParallel's rule, for the same numbers: ranks take rank 0's buffers before a forward,
    unless the last one ran without gradients. They take all buffers, since some writes go unnoticed: batch norm's
    kernel counts none, nor does code that writes through ``data``.

    Args:
        model: the model; its buffers have the same names, shapes and dtypes on all ranks whenever they are taken. One
            that has none now shares none.
        group: the ranks.
        lanes: the lanes; it uses the network.
    """

    def __init__(self, model: nn.Module, group: Group, lanes: Lanes) -> None:
        self._model, self._group, self._network = model, group, lanes.network
        self._any = group.size > 1 and next(model.buffers(), None) is not None
        self._due = True

    def before_forward(self) -> None:
        """Takes rank 0's buffers if they are due; `InputError` on all ranks if these have others."""
        if self._due:
            self.take()

    def after_forward(self) -> None:
        """Notes the end of a forward."""
        self._due = torch.is_grad_enabled()

    def of_rank_0(self) -> dict[torch.Tensor, torch.Tensor]:
        """Rank 0's values for this rank's buffers, which stay unchanged; empty on rank 0. All ranks must call this."""
        return {place.buffer: value for place, value in self._received()}

    @torch.no_grad()
    def take(self) -> None:
        """Gives this rank's buffers rank 0's values, if possible in place, so that all their holders see them."""
        for place, value in self._received():
            own = place.buffer
            if own.layout != torch.strided or own.is_inference() or has_internal_overlap(own):  # none can be written to
                with torch.inference_mode(False):
                    place.put(value.to(own.device, copy=True))
                continue
            # As under DDP, the write does not invalidate saved tensors: there may be two forwards before one backward.
            with version_counter_kept(own):
                own.copy_(value)

    def _received(self) -> list[tuple[BufferPlace, torch.Tensor]]:
        """Rank 0's values, on the ranks that are not rank 0."""
        if not self._any:
            return []
        places = self._network.ask(self._agreed)
        values: list[torch.Tensor] = []  # the lane's thread fills it, before compute waits for it
        self._network.submit(lambda: values.extend(self._send([place.buffer for place in places]))).wait()
        for value in values:
            if value.is_cuda:  # memory of the lane's stream, which may not be reused before compute has read it
                value.record_stream(torch.cuda.current_stream(value.device))
        return list(zip(places, values, strict=True)) if self._group.rank else []

    def _agreed(self) -> list[BufferPlace]:
        """The buffers that are there now, each once, in the same order on all ranks."""
        places: dict[torch.Tensor, BufferPlace] = {}
        for place in buffer_places(self._model):
            places.setdefault(place.buffer, place)
        kinds = {place.name: f"buffer {_form(place.buffer)} {kind_of(place.buffer)}" for place in places.values()}
        way = "let forwards register the same buffers on all ranks, and keep what grows with their data in attributes"
        refuse_different(self._group, "buffers", kinds, way)
        return sorted(places.values(), key=lambda place: (_form(place.buffer), place.name))

    def _send(self, buffers: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields rank 0's values, which come in one message for each dtype."""
        for _, alike in itertools.groupby(buffers, _form):
            here = list(alike)
            if here[0].layout != torch.strided:
                mine = None if self._group.rank else [buffer.cpu() for buffer in here]
                yield from self._group.exchange("sparse buffers", mine)[0]
                continue
            message = torch.cat([buffer.reshape(-1) for buffer in here])
            self._group.send_from_rank_0(message)
            parts = message.split([buffer.numel() for buffer in here])
            yield from (part.view(buffer.shape) for buffer, part in zip(here, parts, strict=True))


def _form(buffer: torch.Tensor) -> str:
    return f"{buffer.device.type} {buffer.layout} {buffer.dtype}"
