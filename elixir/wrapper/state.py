"""Weights in and out under the model's own names: full values, no more than one chunk gathered at a time.

Every module of a wrapped model, and so its ``save_pretrained``, gives and takes full values in the weights' dtype. The
wrapper's own state dict has float32: master weights where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot
from elixir.errors import InputError
from elixir.wrapper.uses import WeightUses


class ModelState:
    """Makes ``state_dict`` and ``load_state_dict`` of every module of a model full and strict.

    Args:
        model: whose modules are changed.
        chunks: all chunks of the plan.
        tracked: those whose parameters may be placeholders, or whose weights are still being updated.
        uses: their listener.
        settle: waits for what is still being written to the weights.
        begin: the same, once all ranks have come to the same call.
        whole: gathers a chunk's weights, or its masters; with several ranks all must ask for a state dict together.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[Chunk],
        tracked: Sequence[Chunk],
        uses: WeightUses,
        settle: Callable[[], None],
        begin: Callable[[str], None],
        whole: Callable[[Chunk, bool], torch.Tensor],
    ) -> None:
        self._model = model
        self._uses, self._settle, self._begin, self._whole = uses, settle, begin, whole
        self._slots: dict[nn.Parameter, tuple[Chunk, Slot]] = {
            slot.parameter: (chunk, slot) for chunk in chunks for slot in chunk.slots
        }
        self._tracked = frozenset(chunk.index for chunk in tracked)
        self._full: bool | None = None
        """While the wrapper's own state dict is made: whether this rank wants it."""
        self._given: dict[nn.Parameter, torch.Tensor] = {}
        """Values in the state dict that is being made: names of one tied parameter share one tensor, as they always do."""
        self._gathered: tuple[int, torch.Tensor] | None = None
        """The last chunk that was gathered for a state dict, and its values."""
        self._modules = list(model.modules())
        for module in self._modules:
            module.state_dict = partial(self._together, module.state_dict)  # type: ignore[method-assign, assignment]
            module._save_to_state_dict = partial(self._give, module, module._save_to_state_dict)  # type: ignore[method-assign]
            module._load_from_state_dict = partial(self._take, module, module._load_from_state_dict)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give modules their own methods back."""
        for module in self._modules:
            for name in ("state_dict", "_save_to_state_dict", "_load_from_state_dict"):
                delattr(module, name)

    def full(self, *args: Any, wanted: bool = True, **kwargs: Any) -> dict[str, Any]:
        """The model's state dict on the CPU, in memory of its own, weights in float32 or wider.

        Args:
            wanted: False takes part in gathering and keeps nothing.
        """
        self._full = wanted
        try:
            state = self._model.state_dict(*args, **kwargs)
        finally:
            self._full = None
        return state if wanted else {}

    def _together(self, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A module's state dict; with several ranks, find out first that all of them want one."""
        if self._uses.saving:  # of a module around this one
            return original(*args, **kwargs)
        self._begin("state_dict()")
        self._uses.saving = True
        try:
            return original(*args, **kwargs)
        finally:
            self._uses.saving = False
            self._gathered = None
            self._given.clear()

    def _give(
        self,
        module: nn.Module,
        original: Callable[..., None],
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,
    ) -> None:
        """What a module saves of its own, values in the place of placeholders; before any hook sees it."""
        original(destination, prefix, keep_vars)
        for name, parameter in module._parameters.items():
            key = prefix + name
            if parameter not in self._slots or not isinstance(destination.get(key), torch.Tensor):
                continue
            chunk, slot = self._slots[parameter]
            if self._full is None and (keep_vars or chunk.index not in self._tracked):
                continue
            if parameter not in self._given:
                part = slot.part_of(self._whole_of(chunk)).detach()
                dtype = part.dtype if self._full is None else torch.promote_types(part.dtype, torch.float32)
                keeps = self._full is not False
                self._given[parameter] = part.to("cpu", dtype, copy=True) if keeps else torch.empty(0)
            destination[key] = self._given[parameter]
        if self._full is not None:
            for name in module._buffers:
                if isinstance(value := destination.get(prefix + name), torch.Tensor):
                    destination[prefix + name] = value.detach().to("cpu", copy=True)  # the model's own lives on

    def _whole_of(self, chunk: Chunk) -> torch.Tensor:
        if self._gathered is None or self._gathered[0] != chunk.index:
            self._gathered = None  # no two at a time
            self._gathered = (chunk.index, self._whole(chunk, self._full is not None))
        return self._gathered[1]

    def _take(
        self, module: nn.Module, original: Callable[..., None], state: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Load one module: its parameters are given memory of their own, and what was written there goes home."""
        own = [
            self._slots[parameter]
            for parameter in dict.fromkeys(module._parameters.values())
            if parameter in self._slots and self._slots[parameter][0].index not in self._uses.gathered
        ]
        if not own:
            original(state, prefix, *rest)
            return
        self._uses.refuse_inside("load_state_dict()")
        if rest and isinstance(rest[0], dict) and rest[0].get("assign_to_params_buffers"):
            raise InputError("assign=True would give the parameters other memory; leave it out")
        self._settle()
        memory: list[torch.Tensor] = []
        for chunk, slot in own:
            wide = torch.promote_types(chunk.dtype, torch.float32) if chunk.masters is not None else chunk.dtype
            memory.append(torch.empty(slot.shape, dtype=wide))
            with torch._C.DisableTorchFunctionSubclass():
                slot.parameter.data = memory[-1]
        before = [slot.parameter._version for _, slot in own]
        self._uses.loading = True
        try:
            original(state, prefix, *rest)
        finally:
            self._uses.loading = False
            for (chunk, slot), version, values in zip(own, before, memory, strict=True):
                if slot.parameter._version != version:
                    chunk.write(slot, values)
                chunk.show(slot)
