"""Writes what a command says to standard output, its notes and its progress to standard error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.table import Table

    Shown = str | Table
    Said = Shown | Iterator[Shown] | dict[str, Any] | int
    """Text, a table, a generator of them, an object for ``--json``, or the exit status, which is 0 without one."""

Progress = Callable[[str, int, int], None]
"""Called with what comes next, how much is done, and of how much."""
_NARROWEST_TABLE = 80
"""Characters."""
_NO_TERMINAL_TABLE = 160
"""Characters of a line of a table where no terminal shows it."""
_LONGEST_NUMBER = 15
"""Characters of a number with its unit or range, which stay in one line."""
_LONGEST_WORD = 40
"""Characters; a longer word in a table, such as a path, may be broken."""


class OutputError(OSError):
    """Standard output cannot take the results; says why."""


@contextlib.contextmanager
def writing(stream: TextIO) -> Iterator[None]:
    """Flushes at the end what is written to `stream` inside.

    Raises:
        BrokenPipeError: the reader of the results has stopped.
        OutputError: they cannot be written.
    """
    try:
        try:
            yield
        finally:
            stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # what is left is dropped, or Python would complain at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"the results cannot be written to standard output: {error.strerror or error}") from error


def say(said: Shown | Iterator[Shown] | dict[str, Any], stream: TextIO) -> None:
    """Writes text, an object as JSON, or a table (rich) with an empty line after it; of a generator, all it has."""
    if isinstance(said, Iterator):
        for each in said:
            say(each, stream)
        return
    if isinstance(said, dict):
        said = json.dumps(said, indent=1, allow_nan=False)
    text = said if isinstance(said, str) else _table_text(said, stream)
    with writing(stream):
        print(text, file=stream)


def note(text: str) -> None:
    """Tells the user something that is no result."""
    print(f"elixir: note: {text}", file=sys.stderr)


@contextlib.contextmanager
def progress(*, lines: bool = False, bar: bool = True) -> Iterator[Progress]:
    """Tells on standard error what comes next, by a bar on a terminal.

    Args:
        lines: without a bar, print a line for each; otherwise nothing is printed then.
        bar: False: no bar on a terminal either.
    """
    if not (bar and sys.stderr.isatty()):
        yield _line if lines else lambda text, done, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda text, done, count: shown.update(task, description=text, completed=done, total=count)


def _line(text: str, done: int, count: int) -> None:
    print(f"{done + 1}/{count} {text}", file=sys.stderr, flush=True)


def _table_text(table: Table, stream: TextIO) -> str:
    from rich.console import Console

    # A narrow terminal wraps the lines itself: columns squeezed to a few characters could not be read.
    width = max(shutil.get_terminal_size().columns, _NARROWEST_TABLE) if stream.isatty() else _NO_TERMINAL_TABLE
    # Written to memory first: rich pads lines with spaces, and ends the process where the reader has stopped.
    text = io.StringIO()
    Console(file=text, width=_set_widths(table, width), force_terminal=stream.isatty()).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines()) + "\n"


def _set_widths(table: Table, width: int) -> int:
    """Gives each column of a table a width that breaks no word; returns that of the table, in characters.

    Where whole lines need more than `width`, columns of numbers get theirs first, and then those that lack least.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=_NO_TERMINAL_TABLE)
    left = width - 1 - 2 * len(table.columns)  # a space and the padding between columns, a space at either edge
    lacks = []
    for column in table.columns:
        cells = [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
        longest = max(cell.maximum for cell in cells[not column.no_wrap :])  # rich would cut a heading that cannot wrap
        least = min(max(cell.minimum for cell in cells), _LONGEST_WORD)
        numbers = min(longest, _LONGEST_NUMBER) if column.justify == "right" else 0  # a number keeps its unit
        column.width = longest if column.no_wrap else max(least, numbers)
        left -= column.width
        lacks.append((column.justify != "right", longest - column.width, column))
    for _, lack, column in sorted(lacks, key=lambda each: each[:2]):
        more = max(0, min(lack, left))
        column.width = (column.width or 0) + more
        left -= more
    return width + max(0, -left)
