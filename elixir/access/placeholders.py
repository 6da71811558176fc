"""Tensors that carry a mark which PyTorch's dispatcher sees, so that no operator reads them unnoticed.

`__torch_function__` announces what Python calls. TorchScript, `torch.vmap`, compiled extensions and autograd call
operators without it. So the memory that a streamed parameter points to is *marked*: its tensor has one more dispatch
key, for which a function of ours is registered. Every operator that gets such a tensor comes there first, whatever code
called it.

The key is `DeferredInit`. PyTorch has it for libraries outside of it and registers nothing for it; it comes before
autograd, vmap and autocast, so that a weight is there when these look at it. Where uses have been announced already the
key is switched off for the thread (`unmarked`), and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from elixir.torch_private import (
    DisableTorchFunctionSubclass,
    DispatchKeySet,
    dispatch_key,
    dispatch_keys,
    exclude_key,
    key_is_excluded,
    make_wrapper_subclass,
)

_KEY = dispatch_key("DeferredInit")
_KEYS = DispatchKeySet(_KEY)
_libraries: list[torch.library.Library] = []


class _Made(torch.Tensor):
    """A tensor made with the key. What reads it comes to the key's function first, never here."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} reads a tensor that only lends its memory to parameters")


class unmarked:
    """While it lasts, operators of this thread take marked tensors for ordinary ones."""

    __slots__ = ("_before",)
    excluded = True

    def __enter__(self) -> None:
        self._before = key_is_excluded(_KEY)
        exclude_key(_KEY, self.excluded)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exclude_key(_KEY, self._before)


class remarked(unmarked):
    """Inside of `unmarked`: while it lasts, operators of this thread notice marked tensors again."""

    __slots__ = ()
    excluded = False


def absent(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """A marked tensor without memory: what a parameter points to while its weights are elsewhere. Contiguous without
    `stride`.

    Code that asks for the address of its elements instead of calling operators gets an error from PyTorch
    (``data_ptr<T>()``), or a null pointer.
    """
    made = torch.empty(0, dtype=dtype, device=device)
    # Through `data` it becomes an ordinary tensor that has all of the other but its class.
    made.data = make_wrapper_subclass(
        _Made, shape, stride, dtype=dtype, device=torch.device(device), _extra_dispatch_keys=_KEYS
    )
    return made


def marked(memory: torch.Tensor) -> torch.Tensor:
    """A marked tensor over the same elements as `memory`, which is contiguous. Views of it, made `unmarked`, are
    marked, too."""
    made = absent(memory.shape, memory.dtype, memory.device)
    with torch.no_grad(), unmarked():
        made.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
    return made


def is_absent(item: Any) -> bool:
    """Whether something is a marked tensor without memory."""
    if not isinstance(item, torch.Tensor):
        return False
    with DisableTorchFunctionSubclass():  # to ask is no use
        return dispatch_keys(item).has(_KEY) and item.numel() > 0 and item.data_ptr() == 0


def watch(reached: Callable[..., Any]) -> None:
    """Have ``reached(operator, *args, **kwargs)`` called instead of every operator that gets a marked tensor."""
    own = torch.library.Library("_", "IMPL")
    own.fallback(reached, "DeferredInit")
    aten = torch.library.Library("aten", "IMPL")
    # Asked whenever `parameter.data` is set; it looks at no element.
    aten.impl("_has_compatible_shallow_copy_type", torch.library.fallthrough_kernel, "DeferredInit")
    _libraries.extend((own, aten))  # what is registered lasts as long as they do


def storage_of(tensor: torch.Tensor) -> int:
    """A number that only the storage of this tensor has; 0 if it has none (sparse, or inside vmap)."""
    try:
        number: int = tensor.untyped_storage()._cdata
    except NotImplementedError:
        return 0
    return number
