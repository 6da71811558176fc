"""State that a forward leaves on modules: with several micro-batches in a pass, each would read that of another one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from elixir.errors import InputError


class ModuleState:
    """The tensors that modules hold next to their parameters, as they are when this is made.

    Args:
        model: all its modules are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {where: (value, value._version) for where, value in _held(model)}

    def refuse_changed(self) -> None:
        """Raises if forward has written to one of them, or put another in its place.

        Raises:
            InputError: names the module and the attribute.
        """
        for (module, name), value in _held(self._model):
            before = self._before.get((module, name))
            if before is None or before[0] is not value or before[1] != value._version:
                raise InputError(
                    f"{module or 'the model'} keeps {name!r} from one forward to what follows, and micro-batches that "
                    "pass the layers together would read each other's; plan with pass_size=1"
                )


def _held(model: nn.Module) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    for path, module in model.named_modules():
        if any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__):
            continue  # a metric collects micro-batch by micro-batch, and nothing of the model reads it
        for held in (vars(module), module._buffers):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield (path, name), value
