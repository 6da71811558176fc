"""The buffers of a model, with the modules that have them: `torch.nn.Module.named_buffers` names no module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn


class BufferPlace(NamedTuple):
    """A place where a buffer is registered."""

    name: str
    """The buffer's name in the model."""
    module: nn.Module
    key: str
    """The buffer's name in the module."""
    buffer: torch.Tensor

    @property
    def is_persistent(self) -> bool:
        """Whether the buffer is part of a state dict."""
        # torch has no public query for this, and `state_dict()` would run hooks that may gather full weights.
        return self.key not in self.module._non_persistent_buffers_set

    def put(self, buffer: torch.Tensor) -> None:
        """Registers another buffer instead."""
        self.module._buffers[self.key] = buffer


def buffer_places(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[BufferPlace]:
    """All places of buffers; with `remove_duplicate`, modules with several names are visited once."""
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield BufferPlace(f"{prefix}.{key}" if prefix else key, module, key, buffer)
