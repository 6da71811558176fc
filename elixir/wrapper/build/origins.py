"""Where a model's tensors were before it was wrapped, and how they come back there."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from elixir.chunk.chunk import Slot
from elixir.errors import ElixirError, InputError
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.build.weights import become_real
from elixir.wrapper.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Origin:
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> _Origin:
        # What came on meta gets values in the host's memory.
        return _Origin(torch.device("cpu") if tensor.is_meta else tensor.device, tensor.dtype)


class Origins:
    """Devices and dtypes of a model's parameters and buffers as they came.

    Args:
        model: before it is wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = {parameter: _Origin.of(parameter) for parameter in model.parameters()}
        self._buffers = {
            (module, key): (_Origin.of(buffer), buffer)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }

    @torch.no_grad()
    def give_back(self, engine: Engine, *, alone: bool) -> None:
        """Give every parameter memory with its weights, and every buffer its device.

        Args:
            engine: has the weights; nothing of it may be in use.
            alone: the other ranks do not come here, or cannot be waited for.
        """
        together = engine.plan.world_size > 1
        missing: list[str] = []
        problem: Exception | None = None
        if together and not alone:
            try:
                engine.exchange("close()", None)
            except ElixirError as error:
                problem = error
        for chunk in engine.chunks:
            memory: torch.Tensor | None = None
            if not (together and (alone or problem is not None)):
                try:
                    memory = engine.whole(chunk, precise=True)
                except InputError as error:  # what stops the lanes must come to its end
                    logger.error("the weights that were there before are given back: %s", error)
                except ElixirError as error:  # another rank is gone: the rest cannot be had either
                    problem = error
            if memory is None and chunk.whole is not None:
                memory = chunk.whole  # in the dtype in which the model runs
            if memory is None:
                missing += [slot.name for slot in chunk.slots]
            for slot in chunk.slots:
                self._give(slot, memory)
        self._buffers_back()
        if missing:
            logger.warning(
                "%d weights of which other ranks have a part, %s first, could not be gathered by close() and are on "
                "meta: %s",
                len(missing),
                missing[0],
                "the last forward or backward of this rank raised" if problem is None else problem,
            )

    def _give(self, slot: Slot, memory: torch.Tensor | None) -> None:
        """Give a parameter memory with its part of a chunk's weights; on meta without any."""
        parameter, origin = slot.parameter, self._parameters[slot.parameter]
        with DisableTorchFunctionSubclass():
            if memory is None:
                become_real(parameter, torch.empty_strided(slot.shape, slot.stride, dtype=origin.dtype, device="meta"))
                return
            gradient, parameter.grad = parameter.grad, None
            parameter.data = slot.part_of(memory).to(origin.device, origin.dtype, copy=True)
            if gradient is not None:
                parameter.grad = gradient.to(origin.device, origin.dtype)

    def _buffers_back(self) -> None:
        moved: dict[torch.Tensor, torch.Tensor] = {}
        for (module, key), (origin, before) in self._buffers.items():
            buffer = getattr(module, key, None)  # a TorchScript module keeps its buffers in a form that lacks get()
            if not isinstance(buffer, torch.Tensor) or (
                buffer.device == origin.device and buffer.dtype == origin.dtype
            ):
                continue
            if buffer not in moved:
                moved[buffer] = _uncast(buffer, before, origin)
            module._buffers[key] = moved[buffer]


def _uncast(buffer: torch.Tensor, before: torch.Tensor, origin: _Origin) -> torch.Tensor:
    """The buffer where and as it came; with the very bits if it has only been cast meanwhile."""
    came = origin.device if before.is_meta else before.device
    comparable = not before.is_meta and before.shape == buffer.shape and before.dtype != buffer.dtype
    if comparable and torch.equal(before.to(buffer.dtype), buffer.to(came)):
        return before
    return buffer.to(came, origin.dtype)
