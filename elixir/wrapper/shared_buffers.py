"""Buffers that forwards write to, such as running statistics: ranks go on with rank 0's, as DistributedDataParallel has it.

Each rank's forward sees other data. If ranks kept what each of them wrote, they would evaluate different models, and
which of them was saved would depend on who saved it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from elixir.chunk.group import Group

_Seen = dict[str, tuple[torch.Tensor, int]]
"""Buffers of one module, each with its count of writes."""


class SharedBuffers:
    """The modules of a model that have buffers, and which of those have changed since ranks last agreed on them.

    Args:
        model: whose buffers are the same on all ranks now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {name: module for name, module in model.named_modules() if _own(module)}
        self._seen = {name: _own(module) for name, module in self._modules.items()}

    @property
    def names(self) -> list[str]:
        """Of the modules; the same on all ranks."""
        return list(self._modules)

    def changed(self) -> list[bool]:
        """For each of `names`, whether this rank may have other buffers than it had.

        By modules, since not every kernel counts what it writes: batch norm counts only that it has run, and other norms
        with running statistics not even that.
        """
        return [
            (isinstance(module, _NormBase) and module.training) or _differ(self._seen[name], _own(module))
            for name, module in self._modules.items()
        ]

    @torch.no_grad()
    def take_from_rank_0(self, group: Group, names: Iterable[str]) -> None:
        """Let all ranks have rank 0's buffers of modules that are the same on all ranks. All must call this."""
        names = list(names)
        mine = None
        if group.rank == 0:
            mine = {name: {key: value.cpu() for key, (value, _) in _own(self._modules[name]).items()} for name in names}
        for name, values in group.exchange("buffers", mine)[0].items():
            module = self._modules[name]
            for key, value in values.items() if group.rank > 0 else ():
                _put(module, key, value)
            self._seen[name] = _own(module)


def _own(module: nn.Module) -> _Seen:
    # What was made in inference mode counts no writes.
    return {
        key: (buffer, 0 if buffer.is_inference() else buffer._version)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def _differ(before: _Seen, now: _Seen) -> bool:
    if list(before) != list(now):
        return True
    return any(now[key][0] is not buffer or now[key][1] != version for key, (buffer, version) in before.items())


def _put(module: nn.Module, key: str, value: torch.Tensor) -> None:
    own = module._buffers.get(key)
    if own is not None and own.shape != value.shape and key in module._non_persistent_buffers_set:
        return  # a cache that has grown with this rank's data, whose size the module keeps beside it
    if own is not None and own.shape == value.shape and own.dtype == value.dtype and not own.is_inference():
        own.copy_(value)
    else:
        module._buffers[key] = value if own is None else value.to(own.device)
