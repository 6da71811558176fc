"""Settings of PyTorch and Python that a user's code may change, put back after it."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from elixir.torch_private import default_device_context

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that reads a value, and one that sets it."""


@contextlib.contextmanager
def restored(*settings: Setting, shared: tuple[Setting, ...] = ()) -> Iterator[None]:
    """While open, settings may change; afterwards those that have changed are set back.

    Args:
        settings: what reads and what sets them.
        shared: others that belong to all threads. They are set back only if no other thread runs, which may be using
            them.
    """
    before = [(read(), read, restore) for read, restore in (*settings, *shared)]
    try:
        yield
    finally:
        for value, read, restore in before[: None if threading.active_count() == 1 else len(settings)]:
            # Setting what is set already is no idle act: warnings would be shown again, and MKL choose other kernels.
            if not _same(read(), value):
                restore(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):  # a state of a generator may hold arrays
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, (np.ndarray, torch.Tensor)) else bool(one == other)


def _set_filters(value: tuple[Any, ...]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _default_device() -> torch.device | None:
    """The device of `torch.set_default_device`; `torch.get_default_device` names that of a ``with`` instead."""
    context = getattr(default_device_context, "device_context", None)
    return None if context is None else context.device


GENERATORS: tuple[Setting, ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)
"""The host's global random number generators."""

FILTERS: Setting = (lambda: tuple(warnings.filters), _set_filters)
DEVICE: Setting = (_default_device, torch.set_default_device)

COMPUTATION: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (lambda: torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda value: torch.set_autocast_enabled("cuda", value)),
    (lambda: torch.get_autocast_dtype("cpu"), lambda value: torch.set_autocast_dtype("cpu", value)),
    (lambda: torch.get_autocast_dtype("cuda"), lambda value: torch.set_autocast_dtype("cuda", value)),
)
"""The way in which PyTorch computes."""
