"""Runs code of the user's, which may print, change settings of the whole process, and try to end it.

Nothing can stop `os._exit` and signals that kill.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from elixir.errors import InputError, UserInterruptError, shortened
from elixir.models.settings import PROCESS, restored


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
        sys.path.insert(0, folder)  # a console script does not search there
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
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdout = sys.stderr
    try:
        with restored(*PROCESS), warnings.catch_warnings():
            yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
