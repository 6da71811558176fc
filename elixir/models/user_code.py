"""Code of the user's that is run on the way: it may print, change what is the whole process's, and try to end it.

`os._exit` and signals that kill cannot be held up.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from elixir.errors import InputError, UserInterruptError, shortened
from elixir.torch_private import default_device_context


@contextlib.contextmanager
def contained(what: str) -> Iterator[None]:
    """Runs the user's code inside: standard output goes to standard error, and the process is afterwards as it was
    before.

    An `Exception` passes as it is; see `called`. A `KeyboardInterrupt` passes too, as a `UserInterruptError`.

    Args:
        what: is run, for the error.

    Raises:
        InputError: the code has raised `SystemExit`, or another exception that is no `Exception`.
    """
    with _process_as_it_was():
        try:
            yield
        except UserInterruptError:
            raise  # it names the code inside
        except KeyboardInterrupt as error:
            raise UserInterruptError(what) from error
        except SystemExit as error:
            raise InputError(f"{what} exited ({_status(error)}); it has to return") from error
        except Exception:
            raise
        except BaseException as error:
            raise InputError(f"{what} raised {described(error)}") from error


def called(text: str, function: Callable[[], Any]) -> Any:
    """The result of the user's `function`, run as in `contained`.

    Args:
        text: its name, as the user gave it.
        function: is called without arguments.

    Raises:
        InputError: it raised anything.
    """
    with contained(f"{text}: the function"):
        try:
            return function()
        except Exception as error:  # it may raise anything
            raise InputError(f"{text}: the function failed: {described(error)}") from error


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
    with contained(f"{text}: the import of {module_name}"):
        sys.path.insert(0, folder)  # a console script does not look there of itself
        try:
            found: Any = importlib.import_module(module_name)
            for part in function_name.split("."):
                found = getattr(found, part, None)
        except Exception as error:  # an import runs the user's code, which may raise anything
            raise InputError(f"{text}: cannot import {module_name}: {described(error)}") from error
        finally:
            if folder in sys.path:  # the code may have changed that, too
                sys.path.remove(folder)
    if not callable(found):
        raise InputError(f"{text}: {module_name} has no function {function_name}")
    function: Callable[..., Any] = found
    return function


def described(error: BaseException) -> str:
    """An error of the user's code in one line, with the last place in a file that is neither ours nor Python's."""
    place, frame = "", error.__traceback__
    ours = (__file__, contextlib.__file__, importlib.__file__)
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if file not in ours and not file.startswith("<"):
            place = f" ({file}:{frame.tb_lineno})"
        frame = frame.tb_next
    try:
        message = " ".join(str(error).split())
    except Exception:  # the error's own code is the user's
        message = "an error that cannot be printed"
    return f"{type(error).__name__}: {shortened(message, 300)}{place}" if message else f"{type(error).__name__}{place}"


def _status(error: SystemExit) -> str:
    if error.code is None or isinstance(error.code, int):
        return f"status {int(error.code or 0)}"
    try:
        return f"status 1: {shortened(str(error.code))}"
    except Exception:  # likewise
        return "status 1"


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Puts back settings of the process and of this thread at the end."""
    before = [save() for save in _SAVED]
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdout = sys.stderr
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for restore in before:
            with contextlib.suppress(OSError, RuntimeError):  # a folder that is gone cannot be the working folder
                restore()
        sys.stdin, sys.stdout, sys.stderr = streams


Restore = Callable[[], object]


def _save_working_folder() -> Restore:
    folder = os.getcwd()
    return lambda: None if _folder_is(folder) else os.chdir(folder)


def _folder_is(folder: str) -> bool:
    try:
        return os.getcwd() == folder
    except OSError:
        return False


def _save_environment() -> Restore:
    """Restores removed variables; those that were set stay, since libraries that are used later are configured by
    it."""
    before = dict(os.environ)

    def restore() -> None:
        for name, value in before.items():
            os.environ.setdefault(name, value)

    return restore


def _save_signals() -> Restore:
    if threading.current_thread() is not threading.main_thread():
        return lambda: None  # nobody else may set them
    known = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in known}

    def restore() -> None:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    return restore


def _save_interpreter() -> Restore:
    limit, collects, disabled = sys.getrecursionlimit(), gc.isenabled(), logging.root.manager.disable

    def restore() -> None:
        sys.setrecursionlimit(limit)
        (gc.enable if collects else gc.disable)()
        logging.disable(disabled)

    return restore


def _save_gradients() -> Restore:
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def restore() -> None:
        if torch.is_inference_mode_enabled() is not inference:
            # Only a guard changes it, and who has entered another keeps that one: this one is never left.
            guard = torch.inference_mode(inference)
            guard.__enter__()
            _NEVER_LEFT.append(guard)
        torch.set_grad_enabled(grad)

    return restore


def _save_defaults() -> Restore:
    dtype, device = torch.get_default_dtype(), _default_device()
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()

    def restore() -> None:
        torch.set_default_dtype(dtype)
        if _default_device() != device:
            torch.set_default_device(device)
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    return restore


def _default_device() -> torch.device | None:
    """That of `torch.set_default_device`; `torch.get_default_device` names the device of a ``with`` around this
    instead."""
    context = getattr(default_device_context, "device_context", None)
    return None if context is None else context.device


def _save_autocast() -> Restore:
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    cached = torch.is_autocast_cache_enabled()

    def restore() -> None:
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)

    return restore


_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGUSR2")
_NEVER_LEFT: list[torch.inference_mode] = []
_SAVED: tuple[Callable[[], Restore], ...] = (
    _save_working_folder, _save_environment, _save_signals, _save_interpreter, _save_gradients, _save_defaults,
    _save_autocast,
)  # fmt: skip
