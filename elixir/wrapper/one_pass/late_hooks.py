"""Hooks of user code on tensors that enter a region, whose gradients go past these tensors."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch

from elixir.errors import InputError
from elixir.torch_private import DisableTorchFunctionSubclass


class LateHooks(NamedTuple):
    """The hooks of a tensor that has entered a region."""

    all: dict[int, Any]
    shape: torch.Size
    value: weakref.ref[torch.Tensor]

    @classmethod
    def watched(cls, value: torch.Tensor) -> LateHooks:
        """The hooks of a tensor, those included that it gets later, seen even when it is gone."""
        value.register_hook(_nothing).remove()  # leaves a dict, in which later ones are
        return cls(_dict_of(value), value.shape, weakref.ref(value))

    def refuse(self) -> None:
        """Raises if user code has put some on it."""
        value = self.value()
        if _of_users(self.all) or (value is not None and value.retains_grad):
            raise late_hook(self.shape)


def hooks_of(value: torch.Tensor) -> frozenset[int]:
    """Numbers of the hooks that user code has put on a tensor."""
    return _of_users(_dict_of(value))


def _dict_of(value: torch.Tensor) -> dict[int, Any]:
    with DisableTorchFunctionSubclass():  # no use of a weight
        found: dict[int, Any] | None = value._backward_hooks
    return {} if found is None else found


def _of_users(hooks: dict[int, Any]) -> frozenset[int]:
    own = "elixir."
    return frozenset(key for key, hook in hooks.items() if not str(getattr(hook, "__module__", "")).startswith(own))


def late_hook(shape: torch.Size) -> InputError:
    """The error about a hook on a tensor of this shape."""
    return InputError(
        f"a hook, or retain_grad(), waits for the gradient of a tensor of shape {list(shape)} that enters a layer, "
        "which a pass of several micro-batches takes elsewhere; leave it out, put it on another tensor of the layer, "
        "such as its output, or plan with pass_size=1"
    )


def refuse_retained(leaf: torch.Tensor) -> None:
    """Makes ``retain_grad()`` of a leaf raise, of which PyTorch would do nothing."""
    leaf.retain_grad = partial(_refuse, leaf.shape)  # type: ignore[method-assign]


def _refuse(shape: torch.Size) -> None:
    raise late_hook(shape)


def _nothing(gradient: torch.Tensor) -> None:
    return None
