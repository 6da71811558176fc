"""The frame of the scripts in ``profile/``: arguments, ranks, a table for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from elixir.artifact import check_writable, write_atomically
from elixir.errors import ElixirError, InputError
from elixir.hardware.memory import check_device
from elixir.hardware.rate_fit import fit_unit
from elixir.microbench.bench import Bench, Job, default_device, run_jobs
from elixir.microbench.fitting import Series, today
from elixir.microbench.ranks import joined
from elixir.units import format_seconds

_UNITS = {"numel": "elements", "flops": "FLOP", "bytes": "bytes"}
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def run_script(
    jobs: Callable[..., Sequence[Job]],
    description: str | None,
    arguments: Sequence[str] | None = None,
    *,
    needs_ranks: bool = False,
    needs_folder: bool = False,
) -> str:
    """Parses the command line, measures, and writes what was asked for; returns the table to print, with line ends.

    Under torchrun all ranks measure at once, and rank 0 writes; the others give an empty text. A mistake of the user's
    ends the process as argparse does: one line on stderr, status 2. Outputs and device are checked before anything is
    measured.

    Args:
        jobs: an importable function that makes the jobs from a bench.
        description: the script's docstring, shown by ``--help``.
        arguments: instead of those of the process.
        needs_folder: ``--disk-folder`` must be given and is the second argument of `jobs`.
        needs_ranks: one rank has nothing to measure.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda:0, cpu, ... (default: each rank's CUDA device, else cpu)")
    parser.add_argument("--quick", action="store_true", help="smaller buffers, fewer amounts and repetitions")
    parser.add_argument("--out", type=Path, help="write points and fits to this JSON file")
    if needs_folder:
        parser.add_argument("--disk-folder", required=True, help="a folder on the disk to be measured")
    options = parser.parse_args(arguments)
    try:
        if options.out is not None:
            check_writable(options.out)
        with joined() as ranks:
            bench = Bench(
                check_device(options.device) if options.device else default_device(ranks), options.quick, ranks
            )
            if needs_ranks and ranks.size == 1:
                raise InputError("one rank has nothing to measure here; start with torchrun --nproc-per-node N")
            if needs_folder and ranks.size > 1:
                raise InputError("a disk is measured by one process; start this script without torchrun")
            results = run_jobs(jobs(bench, options.disk_folder) if needs_folder else jobs(bench))
            if ranks.rank != 0:
                return ""
        if options.out is not None:
            write_atomically(options.out, as_json(results))
    except ElixirError as error:
        parser.error(str(error))
    return as_table(results) + "\n"


def unit_of(result: Series) -> str:
    """The unit of amounts: ``bytes``, ``elements`` or ``FLOP``."""
    return _UNITS[fit_unit(result.key)]


def format_rate(value: float, unit: str) -> str:
    """``1.5e9, bytes`` -> ``1.50 Gbytes/s``; decimal prefixes, as links are sold."""
    scale, prefix = next((each for each in _SCALES if value >= each[0]), _SCALES[-1])
    return f"{value / scale:.2f} {prefix}{unit}/s"


def as_table(results: Sequence[Series]) -> str:
    """Lines for people: key, rate of large amounts, latency, error of the fit, what ran.

    With several ranks, the rate of each and of all together.
    """
    rows = [("key", "rate", "latency", "fit within", "what ran"), *map(_row, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[c].rjust(widths[c]) for c in (1, 2, 3)), row[4]]) for row in rows
    )


def as_json(results: Sequence[Series]) -> str:
    """JSON text with points, fits and problems, the date and what ran them."""
    series = []
    for result in results:
        record = asdict(result) | {"unit": unit_of(result)}
        if result.fit is not None:
            record["fit"] = {name: getattr(result.fit, name) for name in ("latency_s", "per_s", "error")}
        series.append(record)
    made = {"measured_at": today(), "torch": torch.__version__, "threads": torch.get_num_threads(), "series": series}
    return json.dumps(made, indent=1, allow_nan=False) + "\n"


def _row(result: Series) -> tuple[str, str, str, str, str]:
    if not result.points:
        return result.key, "-", "-", "-", f"not measured: {result.problem}"
    rate = format_rate(result.per_s, unit_of(result))
    if result.ranks > 1 and result.key.endswith(".all_ranks"):
        rate += f" each, {format_rate(result.per_s * result.ranks, unit_of(result))} in all"
    if result.fit is None:
        return result.key, rate, "-", "no fit", f"{result.how} ({result.problem})"
    return result.key, rate, format_seconds(result.fit.latency_s), f"{result.fit.error:.0%}", result.how
