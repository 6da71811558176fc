"""The frame of the scripts in ``profile/``: arguments, ranks, table, JSON, picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from elixir.artifact import check_writable, write_atomically
from elixir.errors import ElixirError, InputError
from elixir.microbench.bench import Bench, check_device, default_device
from elixir.microbench.fitting import Job, Measured
from elixir.microbench.machine import SPAWNED_WORLD, run_jobs
from elixir.microbench.plots import check_picture, plot_fits
from elixir.microbench.ranks import Ranks, joined, spawn
from elixir.microbench.report import as_json, as_table


def run_script(
    jobs: Callable[..., list[Job]],
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
        needs_ranks: one rank has nothing to measure, so two are started unless ``--no-spawn`` is given.
    """
    parser = _parser(description, needs_ranks=needs_ranks, needs_folder=needs_folder)
    options = parser.parse_args(arguments)
    if needs_folder:
        jobs = partial(_in_folder, jobs, options.disk_folder)
    try:
        _check_outputs(options)
        with joined() as ranks:
            device = check_device(options.device) if options.device else default_device(ranks)
            if needs_ranks and ranks.size == 1:
                if options.no_spawn or device.type != "cpu":
                    parser.error("one rank has nothing to measure here; start with torchrun --nproc-per-node N")
                results: list[Measured] = spawn(SPAWNED_WORLD, measured, jobs, device, options.quick)
            else:
                results = measured(ranks, jobs, device, options.quick)
            if ranks.rank != 0:
                return ""
        if options.plot is not None:
            plot_fits(results, options.plot)
        if options.out is not None:
            write_atomically(options.out, as_json(results))
    except ElixirError as error:
        parser.error(str(error))
    return as_table(results) + "\n"


def _parser(description: str | None, *, needs_ranks: bool, needs_folder: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda:0, cpu, ... (default: each rank's CUDA device, else cpu)")
    parser.add_argument("--quick", action="store_true", help="smaller buffers, fewer amounts and repetitions")
    parser.add_argument("--out", type=Path, help="write points and fits to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw points and fits (.pdf, .png or .svg)")
    if needs_ranks:
        parser.add_argument("--no-spawn", action="store_true", help="without torchrun, start no second rank")
    if needs_folder:
        parser.add_argument("--disk-folder", required=True, help="a folder on the disk to be measured")
    return parser


def _check_outputs(options: argparse.Namespace) -> None:
    """Raises an `ElixirError` before anything is measured if what was asked for cannot be written."""
    for path in (options.out, options.plot):
        if path is not None:
            check_writable(path)
    if options.plot is not None:
        check_picture(options.plot)


def _in_folder(jobs: Callable[..., list[Job]], folder: str, bench: Bench) -> list[Job]:
    if bench.ranks.size > 1:
        raise InputError("a disk is measured by one process; start this script without torchrun")
    return jobs(bench, folder)


def measured(ranks: Ranks, jobs: Callable[[Bench], list[Job]], device: torch.device, quick: bool) -> list[Measured]:
    """Runs what `jobs` gives for one rank of `ranks`."""
    return run_jobs(jobs(Bench(device, quick, ranks)))
