"""``elixir try``: ten steps of a model on this machine, predicted next to measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from elixir.artifact import write_atomically
from elixir.cli import files
from elixir.show import tables
from elixir.units import format_bytes, format_seconds, parse_dtype

if TYPE_CHECKING:
    from elixir.cli.output import Said
    from elixir.cli.trial import Compared

MOST_RANGE = 2.0
"""Upper end of the printed range of seconds over its lower end: a wider one says little."""


def run_try(args: argparse.Namespace) -> Iterator[Said]:
    """Measures the machine, plans, takes ten steps, and prints what was predicted next to what was measured."""
    files.check_outputs(data=[args.out])
    files.refuse_artifact(args.model)

    import torch

    from elixir.cli.trial import STEPS, prepared, tried
    from elixir.models.loading import build

    default = "bf16" if torch.cuda.is_available() else "fp32"
    dtype = parse_dtype(default if args.dtype is None else args.dtype)
    names = ("device_memory", "host_memory", "host_budget", "moments")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    model = build(args.model, dtype=dtype, checkpoint=args.checkpoint or "none")
    made = prepared(model, batch=args.batch or 1, seq=args.seq, dtype=dtype, **given)
    try:
        if not args.json:
            yield str(made.module.plan)
        compared, record = tried(args.model, made)
        range_s = made.module.plan.predicted.range_s or (1.0, 1.0)
    finally:
        made.module.close()
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    written = files.written((args.out, lambda path: write_atomically(path, text)))
    if args.json:
        yield record
        return
    rows = []
    for each in compared:
        shown = format_bytes if each.unit == "bytes" else format_seconds
        rows.append([each.name, shown(each.predicted), shown(each.measured), _verdict(each)])
    title = f"{args.model}: {STEPS} steps on {made.machine.device_name}"
    yield tables.list_table(title, ("of one step", "predicted", "measured", ""), rows)
    missed = ", ".join(each.name for each in compared if each.agrees is False)
    said = f"Not as predicted: {missed}. Other work on the machine changes seconds alone." if missed else ""
    said = said or "All as predicted."
    if range_s[1] > MOST_RANGE * range_s[0]:
        said += f" The range spans a factor of {range_s[1] / range_s[0]:.1f}: `elixir hardware --measure` narrows it."
    yield f"{said} --out FILE saves this, to hand on or for `elixir hardware --learn FILE --out hw.json`."
    yield from written


def _verdict(each: Compared) -> str:
    if each.range_s is not None:
        low_s, high_s = map(format_seconds, each.range_s)
        return f"{'within' if each.agrees else 'NOT within'} {low_s} to {high_s}"
    return "" if each.agrees is None else "as predicted" if each.agrees else "NOT as predicted"
