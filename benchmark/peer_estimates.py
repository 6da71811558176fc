"""Memory of a whole AdamW step on the CPU: observed, predicted by Elixir, and estimated by ``accelerate
estimate-memory``.

    python benchmark/peer_estimates.py [--families opt llama] [--no-record]

accelerate is imported for its formula (`estimate_training_usage`, float32) and need not be a dependency. Its estimate
is for a batch of one and has no activations; the step that is observed has the batch of `benchmark/cpu_peaks.py`.
Appends one row per family to ``results/peer_estimates.csv``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import Row, append_rows, conditions, print_table
from benchmark.cpu_peaks import BATCH, SEQUENCE, build_case, percent, predict, seeded_step, shape_of
from benchmark.observe import observe
from elixir.cli.trial import quiet_profiler
from elixir.units import dtype_name

FAMILIES = ("opt", "gpt2", "llama", "bert", "t5")


def estimate_row(family: str) -> Row:
    """Bytes of one step with fused AdamW in float32: parameters, states, gradients, activations, temporaries."""
    import accelerate
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    found_conditions = conditions()
    model, inp = build_case(family, "none", torch.float32, 0.0)
    trace = predict(model, inp, optimizer="AdamW", optimizer_kernel="fused")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        seeded_step(model, inp)
        optimizer.step()

    for _ in range(2):
        step()
        model.zero_grad(set_to_none=True)
    with quiet_profiler():
        observed = trace.resting_bytes + trace.optimizer_bytes + observe(step).peak_bytes
    estimate = max(estimate_training_usage(calculate_maximum_sizes(model)[0], "float32").values())
    return {
        "model": shape_of(family).name,
        "dtype": dtype_name(torch.float32),
        "tokens": BATCH * SEQUENCE,
        "observed_bytes": observed,
        "elixir_bytes": trace.step_peak_bytes,
        "accelerate_bytes": int(estimate),
        "elixir_percent": percent(trace.step_peak_bytes, observed),
        "accelerate_percent": percent(int(estimate), observed),
        "accelerate": accelerate.__version__,
        **found_conditions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = parser.parse_args()
    rows = [estimate_row(family) for family in args.families]
    columns = ("model", "observed_bytes", "elixir_percent", "accelerate_percent")
    print_table("peak of one step", columns, ([row[column] for column in columns] for row in rows))
    if not args.no_record:
        append_rows("peer_estimates", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
