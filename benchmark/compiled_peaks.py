"""Predicted memory of a step with compiled layers on the CPU against a real one: inductor, six families.

    python benchmark/compiled_peaks.py [--families opt t5] [--checkpoints none] [--no-record]

As `cpu_peaks`, with models of more layers and a smaller vocabulary, so that the layers set the peak. The prediction for
the same layers uncompiled, which a trace falls back to, is in the row too. Appends a row per case to
``results/compiled_peaks.csv``; fails if a prediction is more than `BELOW_PERCENT` too low, or more than `ABOVE_PERCENT`
too high.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import Row, append_rows, conditions, print_table
from benchmark.cpu_peaks import build_case, innermost, percent, predict, seeded_step, shape_of
from benchmark.observe import observe_step
from elixir.access.activations import recomputing
from elixir.cli.trial import quiet_profiler
from elixir.models.layer_units import layers_compiled, repeated_layers
from elixir.step_trace import StepShape, UnitActivations
from elixir.units import dtype_name

BELOW_PERCENT = 0.1
PLANNED = "recomputed by a plan"
"""In place of activation checkpointing by the model: a plan recomputes each compiled layer."""
ABOVE_PERCENT = {"none": 2.0, "non-reentrant": 5.0, PLANNED: 5.0}
"""How far above the observed peak a prediction may be, by activation checkpointing."""
FAMILIES = ("opt", "gpt2", "llama", "bert", "vit", "t5")
CASES = (
    *itertools.product(ABOVE_PERCENT, (0.0, 0.1), (torch.float32,)),
    ("none", 0.0, torch.bfloat16),
)
"""Activation checkpointing, dropout, dtype."""
LAYERS, VOCABULARY = 6, 512


def peak_row(family: str, checkpoint: str, dropout: float, dtype: torch.dtype) -> Row:
    """One case: peak over what was there before the step, predicted and observed."""
    found_conditions = conditions()
    torch._dynamo.reset()
    shape = shape_of(family, LAYERS, VOCABULARY)
    planned = checkpoint == PLANNED
    model, inp = build_case(family, "none" if planned else checkpoint, dtype, dropout, shape)
    started = time.perf_counter()
    uncompiled = predict(model, inp)
    without = time.perf_counter() - started
    activations = tuple(UnitActivations(name, ()) for name in repeated_layers(model).values() if planned)
    trace = predict(model, inp, compile=True, shape=StepShape(activations=activations))
    traced = time.perf_counter() - started - without
    with layers_compiled(model, True, keep=True), recomputing(model, activations), quiet_profiler():
        observed = observe_step(model, inp, seeded_step)
    predicted = trace.backward_peak_bytes - trace.resting_bytes
    as_uncompiled = uncompiled.backward_peak_bytes - uncompiled.resting_bytes
    return {
        "model": shape.name,
        "checkpoint": checkpoint,
        "dtype": dtype_name(dtype),
        "dropout": dropout,
        "predicted_bytes": predicted,
        "observed_bytes": observed.peak_bytes,
        "difference_bytes": predicted - observed.peak_bytes,
        "difference_percent": percent(predicted, observed.peak_bytes),
        "uncompiled_percent": percent(as_uncompiled, observed.peak_bytes),
        "trace_s": round(traced, 2),
        "uncompiled_trace_s": round(without, 2),
        "predicted_peak_operator": trace.peak_operator,
        "observed_peak_operators": innermost(observed),
        "assumptions": "; ".join(trace.assumptions),
        **found_conditions,
    }


def passes(row: Row) -> bool:
    """Whether the prediction is within the bar."""
    return -BELOW_PERCENT <= float(row["difference_percent"]) <= ABOVE_PERCENT[row["checkpoint"]]


def main() -> int:
    """Runs all cases, appends rows, summarises; 1 if any case misses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--checkpoints", nargs="+", default=list(ABOVE_PERCENT), choices=ABOVE_PERCENT)
    parser.add_argument("--no-record", action="store_true", help="append nothing to the results")
    arguments = parser.parse_args()
    rows = []
    cases = [case for case in CASES if case[0] in arguments.checkpoints]
    for family, case in itertools.product(arguments.families, cases):
        rows.append(peak_row(family, *case))
        print({key: rows[-1][key] for key in list(rows[-1])[:11]}, flush=True)
    columns = ("model", "checkpoint", "dtype", "dropout", "observed_bytes", "difference_percent", "uncompiled_percent")
    print_table("peaks of steps with compiled layers", columns, ([row[key] for key in columns] for row in rows))
    if not arguments.no_record:
        append_rows("compiled_peaks", rows)
    return 0 if all(map(passes, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
