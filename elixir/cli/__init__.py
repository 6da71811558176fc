"""``elixir try | profile | hardware | plan | check | show | compare | models | sweep | fit | explain | timeline |
checkpoint``.

Nothing of ours is imported up front, and everything else inside of `main`, so that a user who interrupts an import gets
an answer. ``elixir --help``, ``show``, ``compare``, ``models`` and ``hardware`` import no torch, unless they measure.

A command is a generator of what it has to say: text, tables and generators of them, an exit status, and a record, which
is a dict. `main` alone prints that, to standard output: the record under ``--json``, and otherwise all but the record.
While a command works, what else is printed from Python goes to standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, Sequence

    from elixir.cli.output import Said

__all__ = ["main"]

BAD_INPUT_STATUS = 2
DEFECT_STATUS = 1
INTERRUPTED_STATUS = 130  # 128 + SIGINT, as shells report it
_MODULES = {
    **dict.fromkeys(("show", "compare", "models", "hardware"), "show"),
    **dict.fromkeys(("profile", "plan", "check"), "commands"),
    **dict.fromkeys(("sweep", "fit", "explain", "timeline"), "whatif"),
    **{"checkpoint": "checkpoints", "try": "trial"},
}
"""Command -> the module that runs it: one imports only what its command needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    0: done. 2: the caller's mistake, a plan that cannot fit, or results that cannot be written, explained on standard
    error. 1: a defect of Elixir, or something that ``elixir check`` found. 130: interrupted. With ``--debug`` an
    error is raised instead of explained.

    Args:
        argv: the words after the program's name; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as `elixir ... >&-` does
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    args: Namespace | None = None
    try:
        from elixir.cli import output
        from elixir.cli.options import build_parser, check_rules, normalise

        with output.writing(sys.stdout):  # help, which may have nowhere to go
            parser = build_parser()
            args = parser.parse_args(normalise(words))
            if args.command is None:
                parser.print_help()
                return BAD_INPUT_STATUS
        check_rules(args)
        return _run(args)
    except BrokenPipeError:
        return 0  # the reader (head, less) has seen enough
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in words:
            raise
        if _is_interrupt(error):
            return _complain("elixir: interrupted", INTERRUPTED_STATUS)
        return _explain(args, error)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is an interrupt, or one that code has turned an interrupt into, as that of an import may."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__context__))


def _run(args: Namespace) -> int:
    from importlib import import_module

    from elixir.cli import files, output
    from elixir.garbage import garbage_collection_paused

    files.check_outputs(args)
    stream, status = sys.stdout, 0
    # A command imports and traces for most of its time, and ends; only one that trains makes garbage that matters.
    paused = contextlib.nullcontext() if args.command == "try" else garbage_collection_paused()
    with contextlib.redirect_stdout(sys.stderr), paused:
        module = import_module(f"elixir.cli.{_MODULES[args.command]}")
        run: Callable[[Namespace], Iterator[Said]] = getattr(module, f"run_{args.command}")
        for said in run(args):
            if isinstance(said, int):
                status = said
            elif isinstance(said, dict) == bool(getattr(args, "json", None)):
                output.say(said, stream)
    return status


def _explain(args: Namespace | None, error: BaseException) -> int:
    """Says what went wrong in one line (a `PlanError` adds its levers), and gives the exit status for it."""
    from elixir.cli.options import LONGEST_MESSAGE
    from elixir.errors import ElixirError, PlanError, StateError, shortened

    command = f" {args.command}" if args is not None and args.command else ""
    message = str(error) or type(error).__name__
    if isinstance(error, PlanError) and args is not None:
        from elixir.cli.from_flags import in_flags

        message = error.in_words(lambda lever: in_flags(lever, args))
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{shortened(str(error.filename), 200)}: {error.strerror}"
    if isinstance(error, (ElixirError, ValueError, OSError)) and not isinstance(error, StateError):
        return _complain(f"elixir{command}: error: {shortened(message, LONGEST_MESSAGE)}", BAD_INPUT_STATUS)
    problem = f"{type(error).__name__}: {shortened(message.splitlines()[0], LONGEST_MESSAGE)}"
    return _complain(f"elixir{command}: internal error: {problem} (--debug shows where)", DEFECT_STATUS)


def _complain(text: str, status: int) -> int:
    """Says it on standard error, if that can still be written to; gives the status."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr)
    return status
