"""What the runtime does when the step uses a parameter: fetch its chunk, keep it while it may be read, let it go."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elixir.access import backward_is_running, current_node_number
from elixir.chunk.cache import RCache
from elixir.errors import InputError


@dataclass(frozen=True)
class _SavedWeight:
    """A tensor that autograd saved and that lay in a block: what it takes to make it again from wherever it is then."""

    chunk: int
    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
class _ThreadState:
    scopes: list[list[int]] = field(default_factory=list)
    """Chunks pinned by each module that is running, outermost first."""
    node: int | None = None
    node_pins: list[int] = field(default_factory=list)


class WeightUses:
    """The listener of a running module.

    A chunk stays pinned until the innermost module that was running when it was used returns; in backward, until
    another autograd node asks for a weight. Pins are per thread: backward runs on threads of the engine.

    Args:
        cache: the blocks.
        chunk_of: chunk index of every streamed parameter.
    """

    def __init__(self, cache: RCache, chunk_of: dict[nn.Parameter, int]) -> None:
        self._cache = cache
        self._chunk_of = chunk_of
        self._threads: dict[int, _ThreadState] = {}
        self.writable = 0
        """Above 0 inside ``gathered(write=True)``."""

    def used(self, parameters: list[nn.Parameter], function: str) -> None:
        """Bring the chunks in, and keep them until the running module returns."""
        state = self._state()
        if _writes(function) and not self.writable:
            raise InputError(
                f"{function} writes to a parameter whose weights live elsewhere; do it inside "
                "`with model.gathered(parameters, write=True)`"
            )
        chunks = list(dict.fromkeys(self._chunk_of[parameter] for parameter in parameters))
        if state.scopes:
            self._cache.acquire(chunks)
            state.scopes[-1].extend(chunks)
        elif backward_is_running():
            self._enter_node(state)
            self._cache.acquire(chunks)
            state.node_pins.extend(chunks)
        elif not self.writable:
            raise InputError(
                f"{function} reads a parameter outside of the model's forward, where nothing says how long it is "
                "needed; do it inside `with model.gathered(parameters)`"
            )

    def entered(self, module: nn.Module) -> None:
        """A module starts to run; inside backward, a recompute begins, which ends what ran before it."""
        state = self._state()
        if not state.scopes and backward_is_running():
            self._enter_node(state)
        state.scopes.append([])

    def left(self, module: nn.Module, output: Any) -> Any:
        """A module has returned: its chunks may go. What it returns from inside a block is cloned first."""
        kept = _map_tensors(self._outside, output)
        self._cache.unpin(self._state().scopes.pop())
        return kept

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """Claim what lies in a block."""
        found = self._cache.chunk_at(tensor)
        if found is None:
            return None
        chunk, offset = found
        return _SavedWeight(chunk, offset, tensor.dtype, tensor.size(), tensor.stride())

    def unpack(self, handle: Any) -> torch.Tensor:
        """The weight from wherever it is now, for the node that runs."""
        state = self._state()
        self._enter_node(state)
        self._cache.acquire([handle.chunk])
        state.node_pins.append(handle.chunk)
        memory = self._cache.memory(handle.chunk)
        if memory.dtype != handle.dtype:
            memory = memory.view(handle.dtype)
        return memory.as_strided(handle.size, handle.stride, memory.storage_offset() + handle.offset)

    def backward_done(self) -> None:
        """No autograd node is running any more on any thread."""
        for state in self._threads.values():
            self._cache.unpin(state.node_pins)
            state.node, state.node_pins = None, []

    def reset(self) -> None:
        """A forward was left by an exception: nothing is pinned any more."""
        for state in self._threads.values():
            for scope in state.scopes:
                self._cache.unpin(scope)
            state.scopes.clear()
        self.backward_done()

    def _enter_node(self, state: _ThreadState) -> None:
        node = current_node_number()
        if node != state.node:
            self._cache.unpin(state.node_pins)
            state.node, state.node_pins = node, []

    def _state(self) -> _ThreadState:
        return self._threads.setdefault(threading.get_ident(), _ThreadState())

    def _outside(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._cache.chunk_at(tensor) is not None else tensor


def _writes(function: str) -> bool:
    return (function.endswith("_") and not function.endswith("__")) or function in ("__setitem__", "__iadd__")


def _map_tensors(change: Any, output: Any) -> Any:
    """`change` on the tensors of a module's output, in the containers that modules return."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, (tuple, list)) and type(output) in (tuple, list):
        return type(output)(_map_tensors(change, item) for item in output)
    if isinstance(output, dict):
        for key, value in output.items():
            changed = _map_tensors(change, value)
            if changed is not value:
                output[key] = changed
    return output
