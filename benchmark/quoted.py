"""Holds the figures that README and docs quote against the newest rows in ``benchmark/results``.

A quoted figure is followed by a comment that names its row and column, which no reader sees::

    traced in 0.41 s<!-- row trace_speed part=trace model=opt-175b what=cache: wall_p50_s -->

After the file come conditions on columns (``=``, ``<``, ``<=``, ``>``, ``>=``), then a colon and the value: a column,
an aggregate of one (``median ratio``; also min, max, mean, p80, largest and average of absolute values, and count), and
steps of arithmetic from left to right (``median ratio - 1 * 100``). Of rows that measured the same case only the last
in the file counts.

    python -m benchmark.quoted            # says what is stale; exit status 1 if anything is
    python -m benchmark.quoted --write    # writes the newest figures into the documents
"""

from __future__ import annotations

import argparse
import functools
import operator
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

CASES: dict[str, tuple[str, ...]] = {
    "adam_out_of_place": ("moments", "step", "what", "numel"),
    "adam_speed": ("part", "what", "numel"),
    "checkpoint_speed": ("model", "layers", "ranks", "figure"),
    "disk_pipeline": ("file_system", "states_bytes", "figure"),
    "disk_steps": ("model", "tokens", "homes", "disk"),
    "cpu_optimizer": ("model", "dtype", "optimizer", "tokens"),
    "cpu_peaks": ("model", "checkpoint", "dtype", "dropout", "batch", "tokens_per_sample"),
    "finetune": ("ranks", "how", "seed"),
    "host_peak": ("model", "homes", "world_size"),
    "integration_overhead": ("model", "layers", "hidden"),
    "onednn_scratchpads": ("dtype", "rows", "inner", "columns", "left_transposed"),
    "overlap_speed": ("figure",),
    "peer_estimates": ("model", "dtype"),
    "plans_by_constants": ("model", "machine", "device_share", "other"),
    "runtime_speed": ("figure",),
    "search_optimality": ("part", "case", "world_size", "device_bytes", "host_bytes"),
    "search_vs_original": ("hardware", "model", "batch", "seq", "device_gib", "world_size"),
    "simulated_vs_measured": ("model", "tokens", "homes", "transfers_over_compute"),
    "situations": ("situation",),
    "early_update_simulated": ("model", "tokens", "homes", "transfers_over_compute"),
    "early_update_speed": ("figure",),
    "transformers_classes": ("class", "device"),
    "trace_speed": ("part", "model", "what", "batch", "seq", "dtype"),
}
"""File -> the columns that say which case a row measured."""

AGGREGATES: dict[str, Callable[[Any], float]] = {
    "median": lambda values: float(values.median()),
    "mean": lambda values: float(values.mean()),
    "min": lambda values: float(values.min()),
    "max": lambda values: float(values.max()),
    "p80": lambda values: float(values.quantile(0.8)),
    "largest": lambda values: float(values.abs().max()),
    "average": lambda values: float(values.abs().mean()),
    "count": lambda values: float(len(values)),
}
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
STEPS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

_QUOTED = re.compile(r"(?P<figure>-?\d[\d,]*(?:\.\d+)?)(?P<unit>[^\d<>]{0,20})<!-- row (?P<row>.*?) -->")
_MARK = re.compile(r"<!-- row ")


class QuoteError(ValueError):
    """A comment in a document names no row, or more than one."""


@dataclass(frozen=True)
class Quoted:
    """One figure in a document."""

    document: Path
    line: int
    figure: str
    """The figure as the document has it, such as ``1,626.2``."""
    row: str
    """The comment's text."""

    @property
    def newest(self) -> str:
        """The figure of the newest row, with as many decimals as are quoted."""
        decimals = len(self.figure.partition(".")[2])
        return f"{value_of(self.row):{',' if ',' in self.figure else ''}.{decimals}f}"

    @property
    def stale(self) -> bool:
        return self.newest != self.figure


@functools.cache
def newest_rows(name: str) -> Any:
    """A results file as a frame, one row for every case: the last that was appended."""
    if name not in CASES:
        raise QuoteError(f"no case columns are declared for {name}; known: {', '.join(CASES)}")
    rows = pd.read_csv(RESULTS / f"{name}.csv")
    return rows.drop_duplicates(list(CASES[name]), keep="last")


def value_of(row: str) -> float:
    """The number that a comment asks for.

    Raises:
        QuoteError: the comment cannot be read, or without an aggregate other than one row matches.
    """
    where, colon, value = row.rpartition(":")
    if not colon:
        raise QuoteError(f"expected 'FILE CONDITION... : VALUE', found {row!r}")
    name, *conditions = shlex.split(where)
    rows = newest_rows(name)
    for condition in conditions:
        rows = rows[_holds(rows, condition)]
    words = value.split()
    aggregate = words.pop(0) if words[0] in AGGREGATES else None
    column = words.pop(0)
    if column not in rows.columns:
        raise QuoteError(f"{name}.csv has no column {column!r}; it has {', '.join(rows.columns)}")
    if not len(rows) or (aggregate is None and len(rows) != 1):
        raise QuoteError(f"expected {'one row' if aggregate is None else 'rows'} for {row!r}, found {len(rows)}")
    result = float(rows[column].iloc[0]) if aggregate is None else AGGREGATES[aggregate](rows[column])
    for step, number in zip(words[::2], words[1::2], strict=True):
        result = STEPS[step](result, float(number))
    return result


def _holds(rows: Any, condition: str) -> Any:
    found = re.fullmatch(r"(\w+)(<=|>=|=|<|>)(.*)", condition)
    if found is None or found[1] not in rows.columns:
        raise QuoteError(f"expected COLUMN=VALUE with a column of the file, found {condition!r}")
    column, comparison, wanted = found.groups()
    if comparison == "=":
        return rows[column].map(str) == wanted
    try:
        return COMPARISONS[comparison](rows[column], float(wanted))
    except (TypeError, ValueError):
        raise QuoteError(f"{condition!r} compares what are not numbers") from None


def documents() -> list[Path]:
    """All pages on which figures may be quoted."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def quoted_in(document: Path) -> Iterator[Quoted]:
    """All figures with a comment.

    Raises:
        QuoteError: a comment follows no figure.
    """
    text = document.read_text(encoding="utf-8")
    found = list(_QUOTED.finditer(text))
    marked = {match.end("unit") for match in found}
    for mark in _MARK.finditer(text):
        if mark.start() not in marked:
            line = text.count("\n", 0, mark.start()) + 1
            raise QuoteError(f"{document.name}:{line}: a comment 'row ...' must follow a number and at most a unit")
    for match in found:
        yield Quoted(document, text.count("\n", 0, match.start()) + 1, match["figure"], match["row"])


def rewrite(document: Path) -> int:
    """Writes the newest figures into a document; gives how many were stale."""
    stale = [quoted for quoted in quoted_in(document) if quoted.stale]
    if stale:
        newest = iter([quoted.newest for quoted in quoted_in(document)])
        text = document.read_text(encoding="utf-8")
        text = _QUOTED.sub(lambda match: f"{next(newest)}{match['unit']}<!-- row {match['row']} -->", text)
        document.write_text(text, encoding="utf-8")
    return len(stale)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the newest figures into the documents")
    write = parser.parse_args().write
    found = 0
    for document in documents():
        for quoted in quoted_in(document):
            if quoted.stale:
                found += 1
                where = f"{document.relative_to(ROOT)}:{quoted.line}"
                print(f"{where}: {quoted.figure} is quoted, the newest row says {quoted.newest} ({quoted.row})")
        if write:
            rewrite(document)
    return 1 if found and not write else 0


if __name__ == "__main__":
    sys.exit(main())
