"""Writes the results of a command to standard output, and nothing else.

While a command runs, whatever else writes to standard output, as the user's module and libraries do, writes to standard
error. So ``--json`` is JSON, whatever else prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

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


class _Results:
    """The stream of results; outside of a command, standard output."""

    stream: TextIO | None = None

    def get(self) -> TextIO:
        return sys.stdout if self.stream is None else self.stream


_results = _Results()


class OutputError(OSError):
    """Standard output cannot take the results; says why."""


@contextlib.contextmanager
def results_apart(*, for_good: bool) -> Iterator[None]:
    """Keeps standard output for results.

    Args:
        for_good: the process ends after the command, so that what is printed at its very end is kept apart as well.

    Raises:
        BrokenPipeError: the reader of the results has stopped.
        OutputError: they cannot be written.
    """
    before, descriptor = sys.stdout, _descriptor_of(sys.stdout)
    stream: TextIO = before
    if descriptor is not None:
        before.flush()
        stream = os.fdopen(os.dup(descriptor), "w", encoding=before.encoding, errors=before.errors)
        _point_to_errors(descriptor)
    _results.stream, sys.stdout = stream, sys.stderr
    try:
        yield
        _written(stream.flush)
    finally:
        _results.stream = None
        if descriptor is not None:
            if not for_good:
                os.dup2(stream.fileno(), descriptor)
            with contextlib.suppress(OSError):  # said above, or another error is on its way
                stream.close()
        if descriptor is None or not for_good:
            sys.stdout = before


def say(text: str) -> None:
    """Adds a line, or several, to the results."""
    _written(lambda: print(text, file=_results.get()))


def say_json(record: dict[str, Any]) -> None:
    """Adds one JSON object to the results."""
    say(json.dumps(record, indent=1, allow_nan=False))


def say_written(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Adds which files were written, if any were."""
    names = ", ".join(map(str, paths))
    if names:
        say(f"written: {names}")


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


def say_tables(*tables: Any) -> None:
    """Adds tables (rich) to the results, with an empty line after each."""
    from rich.console import Console

    stream = _results.get()
    terminal = stream.isatty()
    # A narrow terminal wraps the lines itself: columns squeezed to a few characters could not be read.
    width = max(_columns(stream), _NARROWEST_TABLE) if terminal else _NO_TERMINAL_TABLE
    for table in tables:
        # Written to memory first: rich pads lines with spaces, and ends the process where the reader has stopped.
        text = io.StringIO()
        Console(file=text, width=_set_widths(table, width), force_terminal=terminal).print(table)
        say("\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines()) + "\n")


def _set_widths(table: Any, width: int) -> int:
    """Gives each column of a table (rich) a width that breaks no word; returns that of the table, in characters.

    Where whole lines need more than `width`, columns of numbers get theirs first, and then those that lack least.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=_NO_TERMINAL_TABLE)
    lacks: list[tuple[int, Any]] = []
    for column in table.columns:
        heading, *cells = (Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells))
        longest = max((cell.maximum for cell in cells), default=0)
        column.width = min(max(cell.minimum for cell in (heading, *cells)), _LONGEST_WORD)
        if column.no_wrap:  # rich would cut what does not fit
            column.width = max(heading.maximum, longest)
        if column.justify == "right":  # a number keeps its unit
            column.width = max(column.width, min(longest, _LONGEST_NUMBER))
        lacks.append((longest - column.width, column))
    spaces = 1 + 2 * len(lacks)  # a space and the padding between columns, a space at either edge
    left: int = width - spaces - sum(column.width for _, column in lacks)
    for lack, column in sorted(lacks, key=lambda pair: (pair[1].justify != "right", pair[0])):
        more = max(0, min(lack, left))
        column.width += more
        left -= more
    return width + max(0, -left)


def flush() -> None:
    """Hands over what has been printed outside of a command, such as help.

    Raises:
        BrokenPipeError, OutputError: as `results_apart`; what is left is dropped, so that nothing complains at the end.
    """
    try:
        _written(sys.stdout.flush)
    except OSError:
        descriptor = _descriptor_of(sys.stdout)
        if descriptor is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
        raise


def _written(write: Any) -> None:
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the results cannot be written to standard output: {error.strerror or error}") from error


def _descriptor_of(stream: TextIO) -> int | None:
    """Descriptor of the process's standard output; None if a caller has replaced it."""
    if stream is not sys.__stdout__:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _point_to_errors(descriptor: int) -> None:
    """Sends what is written to `descriptor` to standard error from now on; nowhere, if that is closed."""
    try:
        os.dup2(2, descriptor)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _columns(terminal: TextIO) -> int:
    try:
        return int(os.environ.get("COLUMNS", "")) or os.get_terminal_size(terminal.fileno()).columns
    except ValueError:
        try:
            return os.get_terminal_size(terminal.fileno()).columns
        except OSError:
            return _NARROWEST_TABLE
    except OSError:
        return _NARROWEST_TABLE
