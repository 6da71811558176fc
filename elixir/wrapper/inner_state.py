"""The state dict of the model inside an `ElixirModule`, and so its `save_pretrained`: full values, on the CPU.

Whoever asks a part of the model for its state dict gets that part's own code, which sees placeholders where weights
are streamed; these are then replaced, so that no more than one chunk is gathered at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot
from elixir.wrapper.uses import WeightUses


class InnerState:
    """Makes ``state_dict`` of every module of a model give full weights, until `remove`.

    Args:
        model: whose modules are changed.
        chunks: whose parameters may be placeholders.
        uses: their listener.
        settle: waits for what is still being written to the weights.
        whole: gathers a chunk; with several ranks all must ask for a state dict together.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[Chunk],
        uses: WeightUses,
        settle: Callable[[], None],
        whole: Callable[[Chunk], torch.Tensor],
    ) -> None:
        self._uses, self._settle, self._whole = uses, settle, whole
        self._slots: dict[nn.Parameter, tuple[Chunk, Slot]] = {
            slot.parameter: (chunk, slot) for chunk in chunks for slot in chunk.slots
        }
        self._modules = list(model.modules())
        for module in self._modules:
            module.state_dict = partial(self._state_dict, module, module.state_dict)  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Give modules their own ``state_dict`` back."""
        for module in self._modules:
            del module.state_dict

    def _state_dict(
        self, module: nn.Module, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if self._uses.saving:  # of a module around this one
            return original(*args, **kwargs)
        self._settle()
        self._uses.saving = True
        try:
            state = original(*args, **kwargs)
        finally:
            self._uses.saving = False
        self._fill(module, state, str(kwargs.get("prefix", args[1] if len(args) > 1 else "")))
        return state

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Put values in the place of placeholders; names of one tied parameter share one tensor, as they always do."""
        wanted: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False):
            value = state.get(name)
            if parameter in self._slots and isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                wanted.setdefault(self._slots[parameter][0].index, []).append((name, parameter))
        for _, entries in sorted(wanted.items()):
            chunk = self._slots[entries[0][1]][0]
            gathered = self._uses.gathered_memory.get(chunk.index)
            whole = self._whole(chunk) if gathered is None else gathered
            values: dict[nn.Parameter, torch.Tensor] = {}
            for name, parameter in entries:
                slot = self._slots[parameter][1]
                if parameter not in values:
                    part = whole[slot.offset : slot.offset + slot.numel].view(slot.shape)
                    values[parameter] = part.detach().to("cpu", copy=True)
                state[name] = values[parameter]
