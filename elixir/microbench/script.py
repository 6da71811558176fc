"""What the scripts in ``profile/`` share: arguments, table, JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from elixir.artifact import check_writable, write_atomically
from elixir.errors import ElixirError
from elixir.microbench.measurement import Measurement, as_json, as_table, check_device


def run_script(
    measure: Callable[[torch.device, bool], Sequence[Measurement]],
    description: str | None,
    arguments: Sequence[str] | None = None,
) -> str:
    """Parse the command line, measure, write JSON where asked; gives the table for the script to print.

    A mistake of the user's ends the process as argparse does: one line on stderr, status 2. The output file and the
    device are checked before anything is measured.

    Args:
        measure: from (device, quick) to measurements.
        description: the script's docstring, shown by ``--help``.
        arguments: instead of those of the process.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda:0, cpu, ... (default: the first CUDA device, else cpu)")
    parser.add_argument("--quick", action="store_true", help="smaller buffers, fewer repetitions")
    parser.add_argument("--out", type=Path, help="write the measurements to this JSON file")
    options = parser.parse_args(arguments)
    try:
        if options.out is not None:
            check_writable(options.out)
        device = check_device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        measurements = measure(device, options.quick)
        if options.out is not None:
            write_atomically(options.out, as_json(measurements))
    except ElixirError as error:
        parser.error(str(error))
    return as_table(measurements)
