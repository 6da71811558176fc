"""Placeholders: tensors with a mark for PyTorch's dispatcher, so that no operator reads them unnoticed.

`__torch_function__` announces what Python calls. TorchScript, `torch.vmap`, compiled extensions and autograd call
operators without it. So the memory that a streamed parameter points to is *marked*: its tensor has one more dispatch
key, for which a function of ours is registered. Every operator that gets such a tensor comes there first, whatever code
called it.

The key is `DeferredInit`, which PyTorch reserves for other libraries. It comes before autograd, vmap and autocast, so
that a weight is present when these read it. Once uses have been announced, the key is switched off for the thread
(`unmarked`) and costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from elixir.access.access_listener import AccessListener
from elixir.errors import InputError
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
    """A tensor with the key. An operator that reads it reaches the key's function, never this class."""

    __torch_dispatch__ = None  # type: ignore[assignment]  # torch asks for one


class unmarked:
    """A context in which operators of this thread treat marked tensors as ordinary ones."""

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
    """A context inside of `unmarked` in which operators of this thread notice marked tensors again."""

    __slots__ = ()
    excluded = False


def absent(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """Creates a marked tensor without memory, to which a parameter points while its weights are elsewhere. It is
    contiguous by default.

    Code that asks for the address of its elements instead of calling operators gets an error from PyTorch
    (``data_ptr<T>()``), or a null pointer.
    """
    made = torch.empty(0, dtype=dtype, device=device)
    # Setting `data` takes over everything but the class.
    made.data = make_wrapper_subclass(
        _Made, shape, stride, dtype=dtype, device=torch.device(device), _extra_dispatch_keys=_KEYS
    )
    return made


def marked(memory: torch.Tensor) -> torch.Tensor:
    """Creates a marked tensor over `memory`, which is contiguous. Its views, taken inside of `unmarked`, are marked,
    too."""
    made = absent(memory.shape, memory.dtype, memory.device)
    with torch.no_grad(), unmarked():
        made.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
    return made


def is_absent(item: Any) -> bool:
    """Whether `item` is a marked tensor without memory."""
    if not isinstance(item, torch.Tensor):
        return False
    with DisableTorchFunctionSubclass():  # this is no use of the weight
        marked = dispatch_keys(item).has(_KEY) and item.numel() > 0
        return marked and (item.data_ptr() == 0 or item.untyped_storage().nbytes() == 0)


def watch(reached: Callable[..., Any]) -> None:
    """Registers ``reached(operator, *args, **kwargs)`` to be called instead of every operator that gets a marked
    tensor."""
    own = torch.library.Library("_", "IMPL")
    own.fallback(reached, "DeferredInit")
    aten = torch.library.Library("aten", "IMPL")
    # Called whenever `parameter.data` is set; it reads no element.
    aten.impl("_has_compatible_shallow_copy_type", torch.library.fallthrough_kernel, "DeferredInit")
    _libraries.extend((own, aten))  # registrations last as long as these objects


def storage_of(tensor: torch.Tensor) -> int:
    """A unique number of the tensor's storage; 0 if it has none (sparse, or inside vmap)."""
    try:
        number: int = tensor.untyped_storage()._cdata
    except NotImplementedError:
        return 0
    return number


def same_memory(item: torch.Tensor, other: Any) -> bool:
    """Whether `other` has the same elements in the same memory as `item`."""
    return other is item or (
        isinstance(other, torch.Tensor)
        and (other.dtype, other.shape, other.stride()) == (item.dtype, item.shape, item.stride())
        and other.storage_offset() == item.storage_offset()
        and storage_of(other) == storage_of(item) != 0
    )


# --- who listens to a storage ----------------------------------------------------------------------------------------
# The listeners to reads of storages whose memory comes and goes, by which views of weights are known.


_LISTENERS: dict[int, weakref.ref[AccessListener]] = {}
"""By the number of the storage."""


def listen(listener: AccessListener) -> Callable[[], object]:
    """Adds a listener to its storages. Returns a function that removes it.

    That runs by itself when the listener is collected: a model may be let go of without being closed, and numbers of
    storages are then given to others.
    """
    storages = tuple(listener.storages)
    _LISTENERS.update(dict.fromkeys(storages, weakref.ref(listener)))
    return weakref.finalize(listener, _remove, storages)


def _remove(storages: Iterable[int]) -> None:
    for storage in storages:
        del _LISTENERS[storage]


def is_listened_to(tensor: torch.Tensor) -> bool:
    """Whether anybody listens to reads of the tensor's storage."""
    return bool(_LISTENERS) and storage_of(tensor) in _LISTENERS


def listener_to(view: torch.Tensor) -> AccessListener:
    """The listener to the storage of a view.

    Raises:
        InputError: nobody listens any more.
    """
    found = _LISTENERS.get(storage_of(view))
    listener = None if found is None else found()
    if listener is None:
        raise InputError(
            f"a view of shape {list(view.shape)} of a weight is read whose model was closed, or which stays on the "
            "device since rehome(); make it anew"
        )
    return listener
