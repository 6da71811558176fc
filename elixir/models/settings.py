"""Settings of PyTorch and Python that code of the user's may change, put back after it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from elixir.torch_private import default_device_context

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that reads a value, and one that sets it."""

_AUTOCAST_KINDS = ("cpu", "cuda")
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGUSR2")
_NEVER_LEFT: list[torch.inference_mode] = []


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
            with contextlib.suppress(OSError, RuntimeError):  # a folder that is gone cannot be the working folder
                if not _same(read(), value):
                    restore(value)


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


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


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it is gone
        return ""


def _add_variables(before: dict[str, str]) -> None:
    """Restores removed variables; others stay, since libraries that are used later are configured by them."""
    for name, value in before.items():
        os.environ.setdefault(name, value)


def _signal_handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}  # no other thread may set them
    return {number: signal.getsignal(number) for name in _SIGNALS if (number := getattr(signal, name, None))}


def _set_signal_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _set_inference(enabled: bool) -> None:
    # Only a guard changes the mode, and code that has entered another one keeps that one: this one is never left.
    guard = torch.inference_mode(enabled)
    guard.__enter__()
    _NEVER_LEFT.append(guard)


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

COMPUTATION: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        _set_deterministic,
    ),
    (_autocast, _set_autocast),
)  # fmt: skip
"""The way in which PyTorch computes."""

PROCESS: tuple[Setting, ...] = (
    (_working_folder, os.chdir),
    (lambda: dict(os.environ), _add_variables),
    (_signal_handlers, _set_signal_handlers),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (gc.isenabled, lambda collects: (gc.enable if collects else gc.disable)()),
    (lambda: logging.root.manager.disable, logging.disable),
    (torch.is_inference_mode_enabled, _set_inference),
    (_default_device, torch.set_default_device),
    *COMPUTATION,
)
"""Everything that code called by name could change in the process."""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, (tuple, list)) and not all(type(item) is int for item in one):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
