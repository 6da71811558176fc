"""Runs `torch.autograd.grad` and `backward` for tracked parameters without announcing them as uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from elixir.access.placeholders import unmarked
from elixir.errors import InputError
from elixir.torch_private import DisableTorchFunctionSubclass


def differentiate(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any], is_tracked: Callable[[Any], bool]
) -> Any:
    """Calls `func` with graph edges instead of parameters, so that no torch function sees the parameters again.

    Args:
        func: ``torch.autograd.grad`` or ``torch.autograd.backward``.
        args: its positional arguments.
        kwargs: its keyword arguments.
        is_tracked: whether an argument is a tracked parameter, a view of one, or contains any.

    Raises:
        InputError: the graph would begin at a weight, or a gradient be stored at a view of one.
    """
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    if is_tracked(next(iter(given.values()))):
        raise InputError(
            f"{func.__name__} begins at a weight, or a view of one, whose values may be elsewhere; begin at what a "
            "module's forward has computed from it"
        )
    inputs = tuple(given.get("inputs") or ())
    with DisableTorchFunctionSubclass(), unmarked():  # this asks for an edge, not for the weight's values
        if func is torch.autograd.backward and any(is_tracked(item) and not item.is_leaf for item in inputs):
            raise InputError(
                "backward(inputs=) cannot leave a gradient at a view of a weight; give the weight itself, or ask "
                "torch.autograd.grad for the gradient of the view"
            )
        given["inputs"] = tuple(get_gradient_edge(item) if is_tracked(item) else item for item in inputs)
    if not given.pop("materialize_grads", False):
        return func(**given)
    # For an edge torch does not know the shape of the zeros.
    found = func(**given | {"allow_unused": True})
    return tuple(
        torch.zeros(item.shape, dtype=item.dtype, device=item.device)
        if gradient is None and isinstance(item, torch.Tensor)
        else gradient
        for gradient, item in zip(found, inputs, strict=True)
    )
