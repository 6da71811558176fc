"""Fills the figures of README and docs in from the newest rows in ``benchmark/results``.

Pages with measured figures have a source in ``docs/src``, which names a row at each place, with a format of Python::

    traced in {{trace_speed_opt_175b_s:.2f}} s

``docs/src/rows.txt`` says for every name where its value comes from, one on a line::

    trace_speed_opt_175b_s = trace_speed part=trace model=opt-175b what=cache: wall_p50_s

After the file come conditions on columns (``=``, ``<``, ``<=``, ``>``, ``>=``), then a colon and the value: a column,
an aggregate of one (``median ratio``; also min, max, mean, p80, largest and average of absolute values, and count), and
steps of arithmetic from left to right, with numbers or other names (``median ratio - 1 * 100``, ``p50_s / trace_s``). Of rows that measured the same case only the last
in the file counts.

    python -m benchmark.quoted            # says which pages are stale; exit status 1 if any is
    python -m benchmark.quoted --write    # makes README.md and the pages of docs from their sources
"""

from __future__ import annotations

import argparse
import difflib
import functools
import operator
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SOURCES = ROOT / "docs" / "src"
ROWS = "rows.txt"
MADE = "<!-- Made from {source} by `make figures`. -->"
"""The last line of a page that is made: edits belong elsewhere."""

CASES: dict[str, tuple[str, ...]] = {
    "adam_speed": ("part", "what", "numel"),
    "checkpoint_speed": ("model", "layers", "ranks", "figure"),
    "disk_steps": ("model", "tokens", "homes", "disk"),
    "cpu_optimizer": ("model", "dtype", "optimizer", "tokens"),
    "cpu_peaks": ("model", "checkpoint", "dtype", "dropout", "batch", "tokens_per_sample"),
    "finetune": ("ranks", "how", "seed"),
    "card_table": ("model", "method", "card", "host_memory"),
    "gpu_proof_h200": ("part", "case", "contender"),
    "overlap_speed": ("figure",),
    "fsdp2_peaks": ("family", "keep"),
    "peer_estimates": ("model", "dtype"),
    "peer_estimates_h200": ("case",),
    "peer_runtimes": ("case", "contender"),
    "runtime_speed": ("figure",),
    "search_optimality": ("part", "case", "world_size", "device_bytes", "host_bytes"),
    "search_vs_original": ("hardware", "model", "batch", "seq", "device_gib", "world_size"),
    "simulated_vs_measured": ("model", "tokens", "homes", "transfers_over_compute"),
    "situations": ("situation",),
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

PLACE = re.compile(r"\{\{(?P<name>\w+):(?P<format>,?\.\d+f)\}\}")
_BRACES = re.compile(r"\{\{[^}]*\}\}")


class QuoteError(ValueError):
    """A place in a source names no row, or a name no figure."""


@functools.cache
def newest_rows(name: str) -> Any:
    """A results file as a frame, one row for every case: the last that was appended."""
    if name not in CASES:
        raise QuoteError(f"no case columns are declared for {name}; known: {', '.join(CASES)}")
    lines = RESULTS / f"{name}.jsonl"
    rows = pd.read_json(lines, lines=True) if lines.exists() else pd.read_csv(RESULTS / f"{name}.csv")
    return rows.drop_duplicates(list(CASES[name]), keep="last")


def value_of(row: str) -> float:
    """The number that a line of `ROWS` asks for.

    Raises:
        QuoteError: the line cannot be read, or without an aggregate other than one row matches.
    """
    where, colon, value = row.rpartition(":")
    if not colon:
        raise QuoteError(f"expected 'FILE CONDITION... : VALUE', found {row!r}")
    name, *conditions = shlex.split(where)
    found = newest_rows(name)
    for condition in conditions:
        found = found[_holds(found, condition)]
    words = value.split()
    aggregate = words.pop(0) if words[0] in AGGREGATES else None
    column = words.pop(0)
    if column not in found.columns:
        raise QuoteError(f"{name}.csv has no column {column!r}; it has {', '.join(found.columns)}")
    if not len(found) or (aggregate is None and len(found) != 1):
        raise QuoteError(f"expected {'one row' if aggregate is None else 'rows'} for {row!r}, found {len(found)}")
    result = float(found[column].iloc[0]) if aggregate is None else AGGREGATES[aggregate](found[column])
    for step, number in zip(words[::2], words[1::2], strict=True):
        known = rows().get(number)
        result = STEPS[step](result, float(number) if known is None else value_of(known))
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
    """All pages for readers."""
    pages = [page for pattern in ("*.md", "docs/**/*.md", "benchmark/*/*.md") for page in ROOT.glob(pattern)]
    return sorted(page for page in pages if not page.is_relative_to(SOURCES))


def sources() -> dict[Path, Path]:
    """Source -> the page that is made from it."""
    found = {source: ROOT / "docs" / source.relative_to(SOURCES) for source in sorted(SOURCES.glob("**/*.md"))}
    return found | {SOURCES / "README.md": ROOT / "README.md"}


def rows() -> dict[str, str]:
    """Name -> the row and the value that it stands for.

    Raises:
        QuoteError: a line has no name, or two have the same.
    """
    found: dict[str, str] = {}
    for line in (SOURCES / ROWS).read_text(encoding="utf-8").splitlines():
        name, equals, row = line.partition(" = ")
        if line.startswith("#"):
            continue
        if not equals or name in found:
            raise QuoteError(f"{ROWS}: expected NAME = FILE CONDITION... : VALUE, each name once, found {line!r}")
        found[name] = row
    return found


def filled_in(source: Path) -> str:
    """The page that a source makes, with the newest figures.

    Raises:
        QuoteError: a place has a name that no row has, or no format.
    """
    known = rows()

    def figure(place: re.Match[str]) -> str:
        if place["name"] not in known:
            raise QuoteError(f"{source.name}: {ROWS} has no {place['name']!r}")
        return format(value_of(known[place["name"]]), place["format"])

    text = source.read_text(encoding="utf-8")
    for braces in _BRACES.findall(text):
        if not PLACE.fullmatch(braces):
            raise QuoteError(f"{source.name}: expected a name and a format such as {{{{name:.2f}}}}, found {braces}")
    made = MADE.format(source=source.relative_to(ROOT).as_posix()) if source.is_relative_to(ROOT) else ""
    return f"{PLACE.sub(figure, text).rstrip()}\n\n{made}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the pages")
    write = parser.parse_args().write
    stale = 0
    for source, page in sources().items():
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        made = filled_in(source)
        stale += made != before
        names = (str(page.relative_to(ROOT)), str(source.relative_to(ROOT)))
        sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), made.splitlines(True), *names, n=0))
        if write and made != before:
            page.write_text(made, encoding="utf-8")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
