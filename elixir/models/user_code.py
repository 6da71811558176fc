"""Runs code of the user's, which may print, change settings of PyTorch and Python, and try to end the process.

Nothing can stop `os._exit` and signals that kill.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from elixir.errors import InputError, shortened
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


@contextlib.contextmanager
def contained(what: str, failed: str = "") -> Iterator[None]:
    """Runs the user's code inside: standard output goes to standard error, and PyTorch's settings are afterwards as
    they were before.

    A `KeyboardInterrupt` passes.

    Args:
        what: is run, for the error.
        failed: the beginning of the error for an `Exception`; empty lets it pass as it is.

    Raises:
        InputError: the code has raised `SystemExit`, or another exception that is no `Exception`; or any, with
            `failed`.
    """
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdout = sys.stderr
    try:
        with restored(DEVICE, *COMPUTATION), warnings.catch_warnings():
            yield
    except BaseException as error:
        is_ordinary = isinstance(error, Exception)
        if isinstance(error, KeyboardInterrupt) or (is_ordinary and not failed):
            raise
        raise InputError(f"{failed if is_ordinary else f'{what} has to return'}: {described(error)}") from error
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams


def called(text: str, function: Callable[[], Any]) -> Any:
    """The result of the user's `function`, run as in `contained`.

    Args:
        text: its name, as the user gave it.
        function: is called without arguments.

    Raises:
        InputError: it raised anything.
    """
    with contained(f"{text}: the function", failed=f"{text}: the function failed"):
        return function()


def imported(text: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; modules in the working folder are found as well.

    Raises:
        InputError: the text is of another form, there is no such module or function, or the import raised anything.
    """
    module_name, colon, function_name = text.partition(":")
    if not (module_name and colon and function_name):
        raise InputError(f"expected module:function, such as my_training:program, found {shortened(text)!r}")
    if module_name.endswith(".py") or "/" in module_name:
        raise InputError(
            f"{shortened(text)!r} names a file; expected module:function as in an import, such as my_training:program "
            "for the file my_training.py in the working folder"
        )
    folder = os.getcwd()
    with contained(f"{text}: the import of {module_name}", failed=f"{text}: cannot import {module_name}"):
        sys.path.insert(0, folder)  # a console script does not search there
        try:
            found: Any = importlib.import_module(module_name)
            for part in function_name.split("."):
                found = getattr(found, part, None)
        finally:
            if folder in sys.path:  # the code may have changed that, too
                sys.path.remove(folder)
    if not callable(found):
        raise InputError(f"{text}: {module_name} has no function {function_name}")
    function: Callable[..., Any] = found
    return function


def described(error: BaseException) -> str:
    """An error of the user's code in one line, with the last place that is not in this file or in Python's import."""
    ours, place = (__file__, contextlib.__file__, importlib.__file__), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if (file := frame.f_code.co_filename) not in ours and not file.startswith("<"):
            place = f" ({file}:{line})"
    message = shortened(_printed(error), 300)
    return f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}"


def _printed(value: object) -> str:
    """A value of the user's in one line, whose own code prints it."""
    try:
        return " ".join(str(value).split())
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
