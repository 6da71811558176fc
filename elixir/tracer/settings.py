"""Settings of PyTorch and Python that a step may change, put back after it."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_AUTOCAST_KINDS = ("cpu", "cuda")


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """While open, a step may set what it likes, and raise what it likes.

    Only what has changed is set back. Random generators and the filters of warnings belong to all threads, and another
    one may be using them: they are set back only if there is none.
    """
    before = [(read(), read, restore) for read, restore in _SETTINGS]
    shared = [(read(), read, restore) for read, restore in _SHARED]
    try:
        yield
    finally:
        if threading.active_count() == 1:
            before += shared
        for value, read, restore in before:
            if not _same(read(), value):
                restore(value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*value)


def _autocast() -> Any:
    kinds = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_KINDS]
    return torch.is_autocast_cache_enabled(), kinds


def _set_autocast(value: Any) -> None:
    torch.set_autocast_cache_enabled(value[0])
    for kind, (enabled, dtype) in zip(_AUTOCAST_KINDS, value[1], strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _set_filters(value: tuple[Any, ...]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (_anomaly, _set_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_deterministic, _set_deterministic),
    (_autocast, _set_autocast),
)
_SHARED: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (lambda: tuple(warnings.filters), _set_filters),
)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, (tuple, list)) and not all(type(item) is int for item in one):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
