"""``elixir try | profile | hardware | plan | check | show | compare | models | sweep | fit | explain | timeline |
checkpoint``.

Nothing but `os`, `signal` and `sys` is imported up front, and everything else inside of `main`, so that a user who
interrupts an import gets an answer. ``elixir --help``, ``show``, ``compare``, ``models`` and ``hardware`` import no
torch, unless they measure. Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence
    from types import FrameType

__all__ = ["main"]

BAD_INPUT_STATUS = 2
DEFECT_STATUS = 1
INTERRUPTED_STATUS = 130  # 128 + SIGINT, as shells report it
_COMMANDS = {
    "show": ("show", "compare", "models"),
    "hardware": ("hardware",),
    "commands": ("profile", "plan", "check"),
    "whatif": ("sweep", "fit", "explain", "timeline"),
    "checkpoints": ("checkpoint",),
    "try_model": ("try",),
}
"""Commands by the module that runs them: one imports only what its command needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    0: done. 2: the caller's mistake, a plan that cannot fit, or results that cannot be written, explained on standard
    error. 1: a defect of Elixir, or something that ``elixir check`` found. 130: interrupted. With ``--debug`` an
    error is raised instead of explained.

    Args:
        argv: the words after the program's name; None: those of this process, which ends after the command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    if sys.stdout is None:  # closed by the caller, as `elixir ... >&-` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    interrupts = _Interrupts()
    command = ""
    try:
        with interrupts:
            args = _parsed(words)
            if args is None:
                return BAD_INPUT_STATUS
            command = f" {args.command}"
            return _run(args, for_good=argv is None)
    except KeyboardInterrupt as error:
        from elixir.errors import UserInterruptError

        if debug:
            raise
        if isinstance(error, UserInterruptError) and not interrupts.came:
            _complain(f"elixir{command}: error: {error} raised KeyboardInterrupt")
            return BAD_INPUT_STATUS
        _complain("elixir: interrupted")
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        return 0  # the reader (head, less) has seen enough
    except Exception as error:
        if debug:
            raise
        if interrupts.seen:  # compiled code, such as an import's, turns an interrupt into another error
            _complain("elixir: interrupted")
            return INTERRUPTED_STATUS
        return _explain(args if command else None, command, error)


class _Interrupts:
    """Knows whether an interrupt has come from outside: code of the user's may raise `KeyboardInterrupt` by itself."""

    def __init__(self) -> None:
        self.came = False
        """Whether it has, or may have: elsewhere than in the main thread nothing is known."""
        self.seen = False
        """Whether it has for certain."""
        self._replaced = False

    def __enter__(self) -> None:
        try:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._handle)
                self._replaced = True
        except ValueError:
            self.came = True  # not in the main thread, which alone may set a handler

    def __exit__(self, *_: object) -> None:
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came = self.seen = True
        signal.default_int_handler(number, frame)


def _parsed(words: list[str]) -> Namespace | None:
    """The arguments; None without a command, after help has been printed."""
    from elixir.cli import output
    from elixir.cli.options import build_parser, normalise

    parser = build_parser()
    try:
        args: Namespace = parser.parse_args(normalise(words))
    except SystemExit:
        output.flush()  # help, which may have nowhere to go
        raise
    if args.command is not None:
        return args
    parser.print_help()
    output.flush()
    return None


def _run(args: Namespace, *, for_good: bool) -> int:
    import contextlib
    from importlib import import_module

    from elixir.cli import output
    from elixir.garbage import garbage_collection_paused

    # A command imports and traces for most of its time, and ends; only one that trains makes garbage that matters.
    paused = contextlib.nullcontext() if args.command == "try" else garbage_collection_paused()
    with output.results_apart(for_good=for_good), paused:
        module = next(name for name, commands in _COMMANDS.items() if args.command in commands)
        run: Callable[[Namespace], int] = getattr(import_module(f"elixir.cli.{module}"), f"run_{args.command}")
        return run(args)


def _explain(args: Namespace | None, command: str, error: Exception) -> int:
    """Says what went wrong in one line (a `PlanError` adds its levers), and gives the exit status for it."""
    from elixir.cli.options import LONGEST_MESSAGE
    from elixir.errors import ElixirError, PlanError, StateError, shortened

    message = str(error) or type(error).__name__
    if args is not None and isinstance(error, PlanError):
        from elixir.cli.from_flags import in_flags

        message = in_flags(error, args)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{shortened(str(error.filename), 200)}: {error.strerror}"
    if isinstance(error, (ElixirError, ValueError, OSError)) and not isinstance(error, StateError):
        _complain(f"elixir{command}: error: {shortened(message, LONGEST_MESSAGE)}")
        return BAD_INPUT_STATUS
    first_line = message.splitlines()[0]
    _complain(
        f"elixir{command}: internal error: {type(error).__name__}: {shortened(first_line, LONGEST_MESSAGE)} "
        "(--debug shows where)"
    )
    return DEFECT_STATUS


def _complain(text: str) -> None:
    """Says it on standard error, if that can still be written to."""
    try:
        print(text, file=sys.stderr)
    except (OSError, ValueError):
        return
