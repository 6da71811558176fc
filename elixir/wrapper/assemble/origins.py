"""`Origins`: remembers where a model's tensors were before wrapping, and brings them back. `SharedBuffers`: lets all
ranks have rank 0's buffers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot, become_real
from elixir.chunk.group import Group
from elixir.chunk.lanes import Lanes
from elixir.chunk.weight_files import FileShard
from elixir.errors import DiskError, ElixirError, InputError, NoMemoryError, RankError
from elixir.models.model_tensors import BufferPlace, buffer_places
from elixir.torch_private import DisableTorchFunctionSubclass, has_internal_overlap, version_counter_kept
from elixir.wrapper.assemble.chunks import refuse_different
from elixir.wrapper.assemble.weight_source import kind_of
from elixir.wrapper.engine import Engine
from elixir.wrapper.weights_io import has_wide_masters, precisely

logger = logging.getLogger(__name__)

_SHORTAGES = (ElixirError, RuntimeError, MemoryError, OSError)
"""Errors of a failing disk, of too little memory, of too few threads and of a lost rank."""


@dataclass(frozen=True)
class _Origin:
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> _Origin:
        # Tensors that came on meta get values in host memory.
        return _Origin(torch.device("cpu") if tensor.is_meta else tensor.device, tensor.dtype)


_HOLDERS: WeakKeyDictionary[nn.Module, WeakSet[Origins]] = WeakKeyDictionary()
"""Modules with buffers -> the wrapped models that they are part of: two models may share a module without weights. Its
buffers stay on the device until the last of these models is closed."""


class Origins:
    """The original devices and dtypes of a model's parameters and buffers.

    Args:
        model: before it is wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter: _Origin.of(parameter) for parameter in model.parameters()}
        self._buffers = [(place, *_first_of(place)) for place in buffer_places(model)]
        for place, *_ in self._buffers:
            if isinstance(place.holder, nn.Module):
                _HOLDERS.setdefault(place.holder, WeakSet()).add(self)

    def undo(self) -> None:
        """Puts the buffers back that were there before a wrapping that has failed."""
        for place, *_ in self._buffers:
            self._leave(place)
            if place.present is not place.buffer:
                place.put(place.buffer)

    @torch.no_grad()
    def give_back(self, engine: Engine, *, alone: bool) -> ElixirError | None:
        """Gives every parameter memory with its weights, and every buffer its device.

        Args:
            engine: the engine with the weights; nothing of it may be in use.
            alone: whether other ranks do not call this, or cannot be waited for.

        Returns:
            The error of any rank's disk whose masters could not be read; weights then have the precision of those in
            memory.
        """
        unread: ElixirError | None = None
        for chunk in engine.chunks:
            if chunk.filed is not None:
                self._give_files(chunk, chunk.filed)
        if engine.group.size > 1:
            unread = self._give_together(engine, alone=alone)
        else:
            for chunk in _in_memory(engine):
                unread = self._give_all(engine, chunk) or unread
        self._buffers_back()
        return unread

    def _give_together(self, engine: Engine, *, alone: bool) -> ElixirError | None:
        """Gives parameters their weights, gathered from all ranks."""
        missing: list[str] = []
        problem: Exception | None = None
        unread: ElixirError | None = None
        if not alone:
            try:
                engine.exchange("close()", None)
            except ElixirError as error:
                problem = error
        for chunk in _in_memory(engine):
            memory: torch.Tensor | None = None
            if not alone and problem is None:
                try:
                    memory, lacking = precisely(engine, chunk)
                    unread = unread or _as_rounded(lacking)
                except _SHORTAGES as error:  # another rank is gone, so that the rest cannot be gathered either
                    problem = error
            if memory is None:
                memory = chunk.weights  # in the dtype of the run
            if memory is None:
                missing += [slot.name for slot in chunk.slots]
            for slot in chunk.slots:
                self._give(slot, memory)
        if missing:
            logger.warning(
                "%d weights of which other ranks have a part, %s first, could not be gathered by close() and are on "
                "meta: %s",
                len(missing),
                missing[0],
                "the last forward or backward of this rank raised" if problem is None else problem,
            )
        elif not alone and problem is None:
            said = engine.exchange("the end of close()", None if unread is None else str(unread))
            rank = next((rank for rank, error in enumerate(said) if error is not None), None)
            if unread is None and rank is not None:
                unread = RankError(f"rank {rank} has rounded weights: {said[rank]}")
        return unread

    def _give_all(self, engine: Engine, chunk: Chunk) -> ElixirError | None:
        """Gives the parameters of a chunk their weights, on one rank."""
        given = False
        unread: ElixirError | None = None
        if has_wide_masters(chunk) and chunk.masters is not None:
            try:
                with chunk.in_memory():
                    chunk.follow_writes()
                    self._give_chunk(engine, chunk, chunk.masters)
                    given = True
            except _SHORTAGES as error:
                unread = _as_rounded(error)
        if given:
            return None  # a failed write back of masters does not matter any more
        self._give_chunk(engine, chunk, chunk.shard_weights)
        return unread

    def _give_chunk(self, engine: Engine, chunk: Chunk, memory: torch.Tensor) -> None:
        try:
            memory = chunk.with_moved(memory) if engine.is_ordinary(chunk) else memory
        except InputError as error:  # `close` must come to its end
            logger.error("the weights that were there before are given back: %s", error)
        for slot in chunk.slots:
            self._give(slot, memory)

    def _give_files(self, chunk: Chunk, filed: FileShard) -> None:
        """Maps the parameters of a chunk from their files, which takes no memory unless they were elsewhere or in
        another dtype before."""
        for slot in chunk.slots:
            origin = self._parameters[slot.parameter]
            try:
                value = filed.mapped(slot.name).to(origin.device, origin.dtype)
            except Exception as error:  # the file is gone, or memory is too small; `close` must come to its end
                logger.error("%s is on meta now, since its file cannot be mapped: %s", slot.name, error)
                self._give(slot, None)
                continue
            with DisableTorchFunctionSubclass():
                slot.parameter.data = value

    def _give(self, slot: Slot, memory: torch.Tensor | None) -> None:
        """Gives a parameter separate memory with its part of a chunk's weights, or puts it on meta without `memory`."""
        parameter, origin = slot.parameter, self._parameters[slot.parameter]
        with DisableTorchFunctionSubclass():
            if memory is None:
                become_real(parameter, torch.empty_strided(slot.shape, slot.stride, dtype=origin.dtype, device="meta"))
                return
            gradient, parameter.grad = parameter.grad, None
            part = slot.part_of(memory)
            try:
                parameter.data = part.to(origin.device, origin.dtype, copy=True)
            except (RuntimeError, MemoryError) as error:  # memory is too small, so the weight stays where it is
                logger.warning("%s stays in the memory of its chunk: %s", slot.name, error)
                parameter.data = part
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype)

    def _buffers_back(self) -> None:
        moved: dict[torch.Tensor, torch.Tensor] = {}
        for place, before, origin in self._buffers:
            buffer = place.present
            if not self._leave(place) or buffer is None:
                continue
            if buffer.device == origin.device and buffer.dtype == origin.dtype:
                continue
            if buffer not in moved:
                moved[buffer] = _uncast(buffer, before, origin)
            place.put(moved[buffer])

    def _leave(self, place: BufferPlace) -> bool:
        """Stops holding a buffer; returns whether no other wrapped model needs it where it is."""
        if not isinstance(place.holder, nn.Module):
            return True
        holders = _HOLDERS.get(place.holder, WeakSet[Origins]())
        holders.discard(self)
        return not holders

    def first_of(self, place: BufferPlace) -> tuple[torch.Tensor, _Origin] | None:
        """The buffer of a place that this model has, too, and its origin, as before this model was wrapped."""
        for mine, before, origin in self._buffers:
            if mine.holder is place.holder and mine.key == place.key:
                return before, origin
        return None


def _first_of(place: BufferPlace) -> tuple[torch.Tensor, _Origin]:
    """The buffer and its origin as before any model that has it was wrapped."""
    holders = _HOLDERS.get(place.holder, ()) if isinstance(place.holder, nn.Module) else ()
    known = (other.first_of(place) for other in holders)
    return next((each for each in known if each is not None), (place.buffer, _Origin.of(place.buffer)))


def _in_memory(engine: Engine) -> list[Chunk]:
    """The chunks whose weights do not live in files."""
    return [chunk for chunk in engine.chunks if chunk.filed is None]


def _as_rounded(error: Exception | None) -> ElixirError | None:
    """Creates the error of `close` for masters that could not be read."""
    if isinstance(error, DiskError):
        return DiskError(
            error.error, error.what, "the model is given back with these weights in the dtype in which it ran"
        )
    return error if error is None or isinstance(error, ElixirError) else NoMemoryError(str(error))


def _uncast(buffer: torch.Tensor, before: torch.Tensor, origin: _Origin) -> torch.Tensor:
    """The buffer on its original device and in its original dtype; the original itself if it was only cast."""
    came = origin.device if before.is_meta else before.device
    comparable = not before.is_meta and before.shape == buffer.shape and before.dtype != buffer.dtype
    if comparable and torch.equal(before.to(buffer.dtype), buffer.to(came)):
        return before
    return buffer.to(came, origin.dtype)


# --- shared buffers --------------------------------------------------------------------------------------------------
# `SharedBuffers`: gives all ranks rank 0's buffers, such as running statistics, as DistributedDataParallel does.
#
# Each rank's forward sees other data. If ranks kept their own writes, they would train and evaluate different models,
# and a saved model would depend on the rank that saved it.


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
