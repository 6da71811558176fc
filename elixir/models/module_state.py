"""State that a forward leaves on modules: with several micro-batches in a pass, each would read that of another one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class ModuleState:
    """The tensors that modules hold next to their parameters, as they are when this is made.

    Args:
        model: all its modules are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: (value, _version(value)) for name, value in _held(model)}

    def changed(self) -> str | None:
        """The name of the first that forward has written to, or put another in its place of; None if there is none."""
        for name, value in _held(self._model):
            before = self._before.get(name)
            if before is None or before[0] is not value or before[1] != _version(value):
                return name
        return None


def _version(tensor: torch.Tensor) -> int | None:
    """Counts what has written to a tensor; None for one made under `torch.inference_mode`, which nothing counts."""
    return None if tensor.is_inference() else tensor._version


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        if any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__):
            continue  # a metric collects micro-batch by micro-batch, and nothing of the model reads it
        for held in (vars(module), module._buffers):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield (f"{path}.{name}" if path else name), value
