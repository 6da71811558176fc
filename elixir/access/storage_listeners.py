"""The listeners to reads of storages whose memory comes and goes, by which views of weights are known."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from elixir.access.access_listener import AccessListener
from elixir.access.placeholders import storage_of
from elixir.errors import InputError

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
