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
        whole: gathers a chunk's weights, or its masters; with several ranks all must ask for a state dict together.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[Chunk],
        tracked: Sequence[Chunk],
        uses: WeightUses,
        settle: Callable[[], None],
        whole: Callable[[Chunk, bool], torch.Tensor],
    ) -> None:
        self._model = model
        self._uses, self._settle, self._whole = uses, settle, whole
        self._slots: dict[nn.Parameter, tuple[Chunk, Slot]] = {
            slot.parameter: (chunk, slot) for chunk in chunks for slot in chunk.slots
        }
        self._tracked = frozenset(chunk.index for chunk in tracked)
        self._modules = list(model.modules())
        for module in self._modules:
            module.state_dict = partial(self._give, module, module.state_dict)  # type: ignore[method-assign, assignment]
            module._load_from_state_dict = partial(self._take, module, module._load_from_state_dict)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give modules their own methods back."""
        for module in self._modules:
            del module.state_dict
            del module._load_from_state_dict

    def full(self, *args: Any, wanted: bool = True, **kwargs: Any) -> dict[str, Any]:
        """The model's state dict on the CPU, in memory of its own, weights in float32 or wider.

        Args:
            wanted: False takes part in gathering and keeps nothing.
        """
        state = self._placeholders(self._model, self._model.state_dict, args, kwargs)
        self._fill(self._model, state, _prefix(args, kwargs), precise=True, wanted=wanted)
        if not wanted:
            return {}
        weights = dict(self._model.named_parameters(_prefix(args, kwargs).rstrip("."), remove_duplicate=False))
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name not in weights:
                state[name] = value.detach().to("cpu", copy=True)  # a buffer, which lives on
        return state

    def _placeholders(
        self, module: nn.Module, original: Callable[..., dict[str, Any]], args: Any, kwargs: Any
    ) -> dict[str, Any]:
        """A state dict as a module itself makes it."""
        self._settle()
        self._uses.saving = True
        try:
            return original(*args, **kwargs)
        finally:
            self._uses.saving = False

    def _give(
        self, module: nn.Module, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if self._uses.saving:  # of a module around this one
            return original(*args, **kwargs)
        state = self._placeholders(module, original, args, kwargs)
        self._fill(module, state, _prefix(args, kwargs), precise=False, wanted=True)
        return state

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, *, precise: bool, wanted: bool) -> None:
        """Put values in the place of placeholders; names of one tied parameter share one tensor, as they always do."""
        by_chunk: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False):
            value = state.get(name)
            if not isinstance(value, torch.Tensor) or parameter not in self._slots:
                continue
            index = self._slots[parameter][0].index
            if precise or (index in self._tracked and not isinstance(value, nn.Parameter)):
                by_chunk.setdefault(index, []).append((name, parameter))
        for _, entries in sorted(by_chunk.items()):
            chunk = self._slots[entries[0][1]][0]
            whole = self._whole(chunk, precise)
            values: dict[nn.Parameter, torch.Tensor] = {}
            for name, parameter in entries if wanted else ():
                slot = self._slots[parameter][1]
                if parameter not in values:
                    part = slot.part_of(whole).detach()
                    wide = torch.promote_types(part.dtype, torch.float32) if precise else part.dtype
                    values[parameter] = part.to("cpu", wide, copy=True)
                state[name] = values[parameter]

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


def _prefix(args: Any, kwargs: Any) -> str:
    return str(kwargs.get("prefix", args[1] if len(args) > 1 else ""))
