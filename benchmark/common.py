"""Common parts of all benchmarks: name the machine, summarise repeated runs, print a table, append rows to a CSV file.

Rows are only ever appended, so that a file tells how figures moved; each row says when, where and with which versions
it was measured.
"""

from __future__ import annotations

import csv
import datetime
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from elixir import __version__

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def conditions() -> Row:
    """The time, machine and versions with which a row was measured; `load` is the machine's one-minute load before it."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "device": f"{_processor()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}{onednn_limit()}",
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "elixir": __version__,
    }


def onednn_limit() -> str:
    """The instruction set that ``ONEDNN_MAX_CPU_ISA`` limits oneDNN to, as rows name it; empty if it is not set."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return f", oneDNN up to {limit}" if limit else ""


def _processor() -> str:
    """The processor's name as Linux gives it, with family and model where the name is anonymous."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return "unknown processor"
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", "unknown processor")
    return f"{name} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50 and p80; of a single value, that value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def append_rows(name: str, rows: Iterable[Row]) -> Path:
    """Appends to ``results/<name>.csv``; all rows have the columns of the first, and of the file if it exists.

    Files of installed packages in messages are named without the folder of the environment.

    Raises:
        SystemExit: the file has other columns; the rows are printed, so that a long run is not lost.
    """
    rows = [{name: _without_folder(value) for name, value in row.items()} for row in rows]
    path = RESULTS / f"{name}.csv"
    columns = list(rows[0])
    if path.exists() and path.stat().st_size:
        with path.open(newline="", encoding="utf-8") as file:
            found = next(csv.reader(file))
        if found != columns:
            for row in rows:
                print(row)
            raise SystemExit(f"{path} has columns {found}, this run has {columns}: move the old file away")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(columns)
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, columns, lineterminator="\n").writerows(rows)
    return path


def _without_folder(value: Any) -> Any:
    return re.sub(r"/\S*/site-packages/", "", value) if isinstance(value, str) else value


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Aligned columns on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
