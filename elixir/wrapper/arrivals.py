"""`Arrivals`: takes gradients from autograd, which has accumulated them, to `GradientFlow`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.gradients.gradient_flow import GradientFlow
from elixir.torch_private import DisableTorchFunctionSubclass


class Arrivals:
    """The hooks of all parameters whose gradients go home, until `remove`.

    A call from autograd takes longer than the copy of a small gradient. So gradients of vectors, such as biases, only
    enter a list. They go home with the unit's next gradient of a matrix, or before the weights of another unit come.

    Args:
        chunks: all chunks of the plan, by index.
        gradients: takes them.
        units: layers that are fetched as one.
        order_compute: see `WeightUses.order_compute`.
        backward_runs: called first, with every gradient of a matrix; it takes those that wait.
        keeps: ``keeps(parameter, gradient)`` says whether a pass of several micro-batches keeps a gradient to itself.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        gradients: GradientFlow,
        units: Iterable[nn.Module],
        *,
        order_compute: Callable[[], None],
        backward_runs: Callable[[], None],
        keeps: Callable[[nn.Parameter, torch.Tensor], bool],
    ) -> None:
        self._chunks, self._gradients = chunks, gradients
        self._order_compute, self._backward_runs, self._keeps = order_compute, backward_runs, keeps
        self._waiting: list[nn.Parameter] = []
        self._places: dict[nn.Parameter, tuple[Chunk, Slot]] = {}
        vectors, arrived = _vectors(units), weakly(self._arrived)
        self._handles = []
        for chunk in chunks:
            for place, slot in enumerate(chunk.slots if chunk.index in gradients.by_chunk else ()):
                parameter = slot.parameter
                if parameter in vectors:
                    self._places[parameter] = chunk, slot
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._waiting.append))
                elif parameter.requires_grad:
                    # The hook must not reference the chunk: autograd would keep it alive for ever.
                    hook = partial(arrived, chunk.index, place)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Removes the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def take_waiting(self) -> None:
        """Sends home what has arrived and waits."""
        if self._waiting:
            with DisableTorchFunctionSubclass():
                while self._waiting:
                    self._take(*self._places[self._waiting.pop(0)])

    def _arrived(self, index: int, place: int, parameter: nn.Parameter) -> None:
        self._backward_runs()
        chunk = self._chunks[index]
        with DisableTorchFunctionSubclass():  # reading the gradient here is no use by the model
            self._take(chunk, chunk.slots[place])

    def _take(self, chunk: Chunk, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is None:
            return
        self._order_compute()
        try:
            if not self._keeps(slot.parameter, gradient):
                self._gradients.take(chunk, slot, gradient)
        finally:  # `step` would take a refused gradient for one that was set by hand
            slot.parameter.grad = None


def _vectors(units: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The trained vectors of the units that train matrices, too."""
    found: set[nn.Parameter] = set()
    for unit in units:
        trained = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        vectors = [parameter for parameter in trained if parameter.dim() < 2]
        found.update(vectors if len(vectors) < len(trained) else ())
    return found


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls an object's method, and does nothing once the object is gone.

    Autograd and parameters hold this function; it must not keep an engine alive, since the garbage collector cannot see
    through autograd.
    """
    # Not a WeakMethod, which would create the method anew at every call, one per gradient.
    bound = cast(MethodType, method)
    weak, function = weakref.ref(bound.__self__), bound.__func__

    def call(*args: Any) -> Any:
        owner = weak()
        return None if owner is None else function(owner, *args)

    return call
