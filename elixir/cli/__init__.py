"""``elixir profile | hardware | plan | show | compare | models | sweep | fit | explain | timeline``.

Only argparse and the parser are imported up front, so that ``elixir --help`` answers at once; each command imports
what it needs. Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from elixir.cli.parser import build_parser, normalise
from elixir.errors import ElixirError, PlanError, StateError

__all__ = ["main"]

BAD_INPUT_STATUS = 2
DEFECT_STATUS = 1
INTERRUPTED_STATUS = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    0: done. 2: the caller's mistake, or a plan that cannot fit, explained on standard error. 1: a defect of ours.
    130: interrupted. With ``--debug`` an error is raised instead of explained.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    if sys.stdout is None:  # closed by the caller, as `elixir ... >&-` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        args = build_parser().parse_args(normalise(words))
        if args.command is None:
            build_parser().print_help()
            return BAD_INPUT_STATUS
        from elixir.cli import commands, questions

        name = f"run_{args.command}"
        status: int = getattr(commands if hasattr(commands, name) else questions, name)(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        if debug:
            raise
        print("elixir: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        # The reader (head, less) has seen enough. What is left in the buffer must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        return _explain(args, error)


def _explain(args: Namespace, error: Exception) -> int:
    """Say what went wrong in one line (a `PlanError` adds its levers), and give the exit status for it."""
    command, message = args.command, str(error) or type(error).__name__
    if isinstance(error, PlanError):
        from elixir.cli.levers import in_flags

        message = in_flags(error, args)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    if isinstance(error, (ElixirError, ValueError, OSError)) and not isinstance(error, StateError):
        print(f"elixir {command}: error: {message}", file=sys.stderr)
        return BAD_INPUT_STATUS
    first_line = message.splitlines()[0]
    print(
        f"elixir {command}: internal error: {type(error).__name__}: {first_line} (--debug shows where)", file=sys.stderr
    )
    return DEFECT_STATUS
