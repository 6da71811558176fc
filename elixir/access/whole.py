"""`Whole`: a tensor that holds others (``__tensor_flatten__`` names them), such as torchao's quantised ones.

It has no memory, and is put together from the parameters that hold its tensors. Below autograd its class calls
operators that neither torch functions nor marks announce, so it announces its tensors itself, all at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch


def holds_others(tensor: Any) -> bool:
    """Whether the tensor holds others, into which it can be taken apart."""
    kind = type(tensor)
    parts = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return parts and kind.__name__ not in ("DTensor", "NestedTensor")


def held(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that one holds, with their names."""
    for name in tensor.__tensor_flatten__()[0]:
        yield name, getattr(tensor, name)


class Whole(torch.Tensor):
    """A tensor that announces the tracked parameters that it holds, before a torch function reads it."""

    elixir_held: tuple[torch.Tensor, ...] = ()
    """The parameters."""
    elixir_kind: Any
    """Its class otherwise."""
    elixir_call: Any
    """``elixir_call(kind, func, types, args, kwargs)`` announces, and calls the torch function of `kind`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.elixir_call(cls.elixir_kind, func, types, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        """Shows no values, which may be elsewhere."""
        return f"{self.elixir_kind.__name__} of shape {list(self.shape)} and {self.dtype}, which a plan has taken apart"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.elixir_kind.__torch_dispatch__(func, types, args, kwargs or {})


@functools.cache
def announcing(kind: type) -> type[Whole]:
    """Returns a class of wholes with the methods and attributes of `kind`."""
    return type(f"Tracked{kind.__name__}", (Whole, kind), {"elixir_kind": kind})
