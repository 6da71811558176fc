"""``elixir try``: ten steps of a model on this machine, predicted next to measured."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from elixir.artifact import write_atomically
from elixir.cli import files, output
from elixir.show import tables
from elixir.units import format_bytes, format_seconds, parse_dtype

if TYPE_CHECKING:
    from elixir.cli.trial import Compared, Trial

MOST_RANGE = 2.0
"""Upper end of the printed range of seconds over its lower end: a wider one says little."""


def run_try(args: argparse.Namespace) -> int:
    """Measures the machine, plans, takes ten steps, and prints what was predicted next to what was measured."""
    files.check_outputs(data=[args.out])
    files.refuse_artifact(args.model)

    import torch

    from elixir.cli.trial import STEPS, try_model
    from elixir.models.loading import build

    default = "bf16" if torch.cuda.is_available() else "fp32"
    dtype = parse_dtype(default if args.dtype is None else args.dtype)
    budgets = {name: getattr(args, name) for name in ("device_memory", "host_memory", "host_budget")}
    model = build(args.model, dtype=dtype, checkpoint=args.checkpoint or "none")
    trial = try_model(
        args.model,
        model,
        batch=args.batch or 1,
        seq=args.seq,
        tell=(lambda _: None) if args.json else output.say,
        dtype=dtype,
        moments=args.moments,
        **{name: value for name, value in budgets.items() if value is not None},
    )
    if args.out:
        write_atomically(args.out, json.dumps(trial.to_dict(), indent=1, allow_nan=False) + "\n")
    if args.json:
        output.say_json(trial.to_dict())
        return 0
    rows = [
        [each.name, _shown(each.predicted, each), _shown(each.measured, each), _verdict(each)]
        for each in trial.compared
    ]
    columns = ("of one step", "predicted", "measured", "")
    output.say_tables(tables.list_table(f"{args.model}: {STEPS} steps on {trial.machine.device_name}", columns, rows))
    output.say(_conclusion(trial))
    output.say_written([args.out] if args.out else [])
    return 0


def _shown(value: float, of: Compared) -> str:
    return format_bytes(int(value)) if of.unit == "bytes" else format_seconds(value)


def _verdict(each: Compared) -> str:
    if each.range_s is not None:
        low_s, high_s = map(format_seconds, each.range_s)
        return f"{'within' if each.agrees else 'NOT within'} {low_s} to {high_s}"
    return "" if each.agrees is None else "as predicted" if each.agrees else "NOT as predicted"


def _conclusion(trial: Trial) -> str:
    missed = [each.name for each in trial.compared if each.agrees is False]
    if missed:
        said = f"Not as predicted: {', '.join(missed)}. Other work on the machine changes seconds alone."
    else:
        said = "All as predicted."
    low_s, high_s = trial.plan.predicted.range_s or (1.0, 1.0)
    if high_s > MOST_RANGE * low_s:
        said += f" The range spans a factor of {high_s / low_s:.1f}: `elixir hardware --measure` narrows it."
    return f"{said} --out FILE saves this, to hand on or for `elixir hardware --learn FILE --out hw.json`."
