"""`SharedWeights`: keeps buffers, attributes and frozen parameters that share memory with a trained weight equal to it.

If the weight is stepped in place on the device, a buffer or attribute still shares its memory. Otherwise weights move,
so it has separate memory, into which new values are copied after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot
from elixir.errors import InputError
from elixir.models.shared_memory import SharedMemory, plain_tensors
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine
from elixir.wrapper.whole_weights import whole


@dataclass
class _Copy:
    """A tensor with a copy of a weight's values."""

    shared: SharedMemory
    tensor: torch.Tensor
    weight: tuple[Chunk, Slot]
    home: tuple[Chunk, Slot] | None
    """The chunk and slot of a frozen parameter; None for a buffer or an attribute."""
    copied: tuple[int, ...] = ()
    """The state of the weight when its values were copied."""
    version: int = -1
    """The version of the tensor at that time. A detached weight has that of the weight, which each step changes."""
    sums: torch.Tensor | None = None
    """`_sums` of the tensor at that time."""


class SharedWeights:
    """Keeps tensors that share memory with weights equal to them.

    Args:
        model: the model inside of the wrapper.
        found: the tensors that shared memory in it before it was wrapped.
    """

    def __init__(self, model: nn.Module, found: Sequence[SharedMemory]) -> None:
        self._model, self._found = model, list(found)
        self._copies: list[_Copy] = []
        self._plain = self._plain_now()
        """The attributes among them."""

    def attach(self, engine: Engine) -> None:
        """Begins under the engine's current plan."""
        self._engine, self._copies = engine, []
        if not self._found:
            return
        engine.renew_shared = self.renew
        tensors = self._tensors()
        for shared in self._found:
            tensor, weight = tensors[shared.name], engine.places[tensors[shared.weight]]
            home = engine.places.get(tensor) if isinstance(tensor, nn.Parameter) else None
            if home is not None and home[0].filed is not None:
                raise InputError(
                    f"{shared.name} shares memory with {shared.weight}, which is trained, so it cannot stay in its "
                    "file; tie the two (one parameter under two names), or plan with frozen_weights='host'"
                )
            chunk, slot = weight
            in_place = engine.is_ordinary(chunk) and chunk.masters is None and home is None
            alike = (tensor.dtype, tensor.device) == (chunk.dtype, slot.parameter.device)
            if in_place and chunk.weights is not None and alike:
                with DisableTorchFunctionSubclass():
                    tensor.data = shared.of(slot.parameter.data, 0)
            else:
                self._copies.append(_Copy(shared, tensor, weight, home))
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Copies the values of changed weights; with several ranks all must call this.

        Raises:
            InputError: a buffer was written to, which has not its weight's values now.
        """
        engine, moved = self._engine, False
        if engine.group.size == 1:  # otherwise all ranks gather the weight of an attribute that one rank still has
            self._forget_replaced()
        for copy in self._copies:
            chunk, _ = copy.weight
            chunk.synchronize_weights()
            now = self._state_of(copy)
            if now == copy.copied:  # the same answer on all ranks, which make the same calls
                self._refuse_written(copy)
                continue
            values = self._values(copy)
            if copy.home is None:
                if copy.sums is not None and not torch.equal(_sums(copy.tensor), copy.sums):
                    _refuse_other(copy, values)
                copy.tensor.copy_(values)
                copy.sums = _sums(copy.tensor)
            else:
                copy.home[0].write(copy.home[1], values)
                moved = True
            copy.copied, copy.version = now, copy.tensor._version
        if moved:
            engine.cache.invalidate()

    def _forget_replaced(self) -> None:
        """Lets go of attributes that are others by now, as `torch.nn.utils.spectral_norm` replaces its in forward."""
        now = self._plain_now() if self._plain else {}
        gone = {name for name, tensor in self._plain.items() if now.get(name) is not tensor}
        if gone:
            self._plain = {name: tensor for name, tensor in self._plain.items() if name not in gone}
            self._found = [shared for shared in self._found if shared.name not in gone]
            self._copies = [copy for copy in self._copies if copy.shared.name not in gone]

    def _plain_now(self) -> dict[str, torch.Tensor]:
        names = {shared.name for shared in self._found}
        return {name: tensor for name, tensor in plain_tensors(self._model) if name in names} if names else {}

    def refuse_written(self) -> None:
        """Raises `InputError` if a forward has written to a copy, which would not reach the weight."""
        for copy in self._copies:
            self._refuse_written(copy)

    def give_back(self) -> None:
        """Puts every tensor back into the memory of its weight, unless that is on meta."""
        self._forget_replaced()
        tensors = self._tensors() if self._found else {}
        with DisableTorchFunctionSubclass():
            for shared in self._found:
                tensor, weight = tensors[shared.name], tensors[shared.weight]
                if not weight.is_meta and (tensor.dtype, tensor.device) == (weight.dtype, weight.device):
                    tensor.data = shared.of(weight.data, 0)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers()), **self._plain}

    def _refuse_written(self, copy: _Copy) -> None:
        if copy.tensor._version == copy.version or copy.home is not None:
            return
        _refuse_other(copy, self._values(copy))
        copy.version = copy.tensor._version

    def _values(self, copy: _Copy) -> torch.Tensor:
        chunk, slot = copy.weight
        here = chunk.weights is None and chunk.on_one_rank
        memory = chunk.shard_weights if here else whole(self._engine, chunk)
        return copy.shared.of(memory, slot.offset)

    @staticmethod
    def _state_of(copy: _Copy) -> tuple[int, ...]:
        chunk, slot = copy.weight
        with DisableTorchFunctionSubclass():
            address = slot.parameter.data_ptr() if chunk.weights is not None else 0
        return chunk.index, id(chunk), slot.parameter._version, chunk.writes, chunk.data_writes, address


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Tells tensors from each other that differ by more than the order of their values."""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return torch.stack([tensor.sum(dtype=torch.float64), norm]).nan_to_num()


def _refuse_other(copy: _Copy, values: torch.Tensor) -> None:
    """Raises `InputError` if a copy has other values than these, those of its weight."""
    if not torch.equal(copy.tensor, values.to(copy.tensor)):
        raise InputError(
            f"{copy.shared.name} was written to, which shares memory with {copy.shared.weight}: under this plan "
            "the weight is elsewhere and would not change; write to the weight"
        )
