"""The buffers of a model, with what has them: `torch.nn.Module.named_buffers` names no module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from elixir.models.quantised import companions


class BufferPlace(NamedTuple):
    """A place where a buffer is registered, or where a tensor hangs that unpacks a quantised weight."""

    name: str
    """The buffer's name in the model; that of a companion is ``<weight>.<companion>``."""
    holder: Any
    """The module, or the object with the quantisation's tensors."""
    key: str
    """The buffer's name in its holder."""
    buffer: torch.Tensor
    is_persistent: bool
    """Whether the buffer is part of a state dict."""

    @property
    def present(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        tensor = getattr(self.holder, self.key, None)  # since a TorchScript module's buffers lack get()
        return tensor if isinstance(tensor, torch.Tensor) else None

    def put(self, buffer: torch.Tensor) -> None:
        """Registers another buffer instead."""
        if isinstance(self.holder, nn.Module):
            self.holder._buffers[self.key] = buffer
        else:
            setattr(self.holder, self.key, buffer)

    def cast(self, dtype: torch.dtype | None) -> torch.dtype:
        """Returns the dtype of the buffer where floating ones take `dtype`; companions keep their own."""
        casts = dtype is not None and self.buffer.is_floating_point() and isinstance(self.holder, nn.Module)
        return dtype if casts and dtype is not None else self.buffer.dtype


def buffer_places(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[BufferPlace]:
    """All places of buffers; with `remove_duplicate`, modules with several names are visited once."""
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        start = f"{prefix}." if prefix else ""
        # torch has no public query for this, and `state_dict()` would run hooks that may gather full weights.
        passing = module._non_persistent_buffers_set
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield BufferPlace(start + key, module, key, buffer, key not in passing)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                for name, holder, own in companions(parameter):
                    yield BufferPlace(f"{start}{key}.{name}", holder, own, getattr(holder, own), True)
