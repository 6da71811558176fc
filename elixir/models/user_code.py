"""Runs code of the user's, which may print, change settings of PyTorch, and try to end the process.

Nothing can stop `os._exit` and signals that kill.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from elixir.errors import InputError, shortened
from elixir.models.settings import COMPUTATION, DEVICE, restored


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
