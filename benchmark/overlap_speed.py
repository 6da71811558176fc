"""The gain of running the host's Adam during compute: steps that do not wait for it, and steps that do.

    python benchmark/overlap_speed.py [--rounds 15] [--no-record]

One rank on the runtime's CPU backend: one thread computes, one steps on the host, links are emulated. All weights of an
OPT-like model (8 layers of 768, float32) are resident, all states on the host, so every gradient goes down the link and
every new weight comes up. Adam keeps its moments in bfloat16 and is compiled: what it computes takes long enough to be
a third of a step that is more than copies, and it asks little of the memory that compute uses too, which on a machine
with a GPU it would not share. *Not overlapped* waits after `optimizer.step()` until all new weights are on the device;
everything else is the same run of the same module. *Overlapped* is Adam during the next forward, with gradients that
are clipped and without. The cases take turns, round after round. The ratio is the median over rounds of the seconds of
a step that waits over those of one that does not. `early_update_speed` has Adam during backward too.

Set by measurements in the same process, before anything is judged:

* the batch, so that Adam is a third of the step that waits: compute is measured at two batches, Adam by the lane's busy
  seconds, and compute should take twice as long (the rows have Adam's share);
* the link, so that gradients, and likewise new weights, take half as long as Adam.

Appends to ``results/overlap_speed.csv``; fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.common import append_rows, conditions, percentiles, print_table  # noqa: E402
from benchmark.emulated_runs import SHAPES, Run, median, mixed_plans, run_apart  # noqa: E402

SHAPE = SHAPES["opt"][0].changed(name="opt 8x768", layers=8, vocabulary=1024)
SEQUENCE = 16
MOMENTS = "bfloat16"
TRIED = (1, 9)
"""Batches at which compute is measured; seconds are taken to lie on a straight line."""
ADAM_SHARE = 1 / 3
"""Share of the step that waits."""
LINK_SHARE = 0.5
"""Seconds of the link, each way, over those of Adam."""
MAX_NORM = 1.0
WARM, TRIES = 2, 5
BARS = {"with clipping": 1.15, "without clipping, during forward only": None}


@dataclasses.dataclass(frozen=True)
class Case:
    """How a step is run."""

    max_norm: float
    waits: bool


CASES = {
    "with clipping": (Case(MAX_NORM, False), Case(MAX_NORM, True)),
    "without clipping, during forward only": (Case(0.0, False), Case(0.0, True)),
}
"""Overlapped, and not."""


def made(batch: int, **setting: bool) -> Run:
    """The model under a plan for so many sequences; `setting` as of `Setting`."""
    from elixir.hardware.profile import preset
    from elixir.models.loading import build
    from elixir.models.step import default_input
    from elixir.tracer.trace import trace_step

    meta = build(SHAPE, device="meta")
    inp = default_input(meta, batch=batch, seq=SEQUENCE)
    machine = preset("cpu")
    trace = trace_step(meta, inp, lambda m, i: m(**i).loss.backward(), hardware=machine, optimizer=None)
    (plan,) = mixed_plans(trace, machine, ("states on host",), moments=MOMENTS, **setting)
    return Run(SHAPE, inp, plan, host_threads=1)


def seconds(batch: int) -> tuple[float, float]:
    """Seconds of compute and of Adam in a step that waits, without a link."""
    run = made(batch)
    steps = [run.step(settle=True) for _ in range(WARM + TRIES)][WARM:]
    run.module.close()
    adam_s = statistics.median(step.report.busy_s["host_adam"] for step in steps)
    return median(steps, "forward_s") + median(steps, "backward_s"), adam_s


def chosen_batch() -> tuple[int, float]:
    """The batch at which Adam is its share of a step that waits, and Adam's seconds."""
    (less_s, one), (more_s, other) = (seconds(batch) for batch in TRIED)
    adam_s = statistics.mean((one, other))
    each_s = (more_s - less_s) / (TRIED[1] - TRIED[0])
    wanted_s = adam_s * (1 / ADAM_SHARE - 1)
    if each_s <= 0:
        raise SystemExit("a larger batch took no longer: the machine is too busy for a measurement")
    return max(1, round(TRIED[0] + (wanted_s - less_s) / each_s)), adam_s


def work(rounds: int) -> dict[str, Any]:
    """Seconds of a step by way of running it, in every round."""
    batch, adam_s = chosen_batch()
    print(f"batch of {batch} x {SEQUENCE} tokens, {adam_s:.3f} s of Adam", file=sys.stderr)
    run = made(batch)
    speed = sum(chunk.weight_bytes for chunk in run.plan.chunks) / (LINK_SHARE * adam_s)
    run.link(speed, speed)
    turns = list(dict.fromkeys(way for ways in CASES.values() for way in ways))
    found: dict[Case, list[tuple[float, float]]] = {way: [] for way in turns}
    for turn in range(rounds):
        for index in range(len(turns)):
            way = turns[(index + turn) % len(turns)]
            run.optimizer.max_norm = way.max_norm
            run.step(settle=way.waits)  # the updates of the step before began in another way
            step = run.step(settle=way.waits)
            found[way].append((step.step_s, step.report.busy_s["host_adam"]))
    run.module.settle()
    run.module.close()
    cases = {name: [found[way] for way in ways] for name, ways in CASES.items()}
    return {"batch": batch, "link_bytes_per_s": round(speed), "cases": cases}


def main() -> int:
    """Runs, records, and compares with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("work_rounds", nargs="?", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work_rounds)))
        return 0
    before = conditions() | {"threads": 1}
    os.environ["ELIXIR_COMPILE"] = "wait"  # no step may differ by when the compiler was done
    answer = run_apart(__file__, str(args.rounds))
    rows, missed = [], []
    for case, (overlapped, waiting) in answer["cases"].items():
        ratios = [waits_s / step_s for (waits_s, _), (step_s, _) in zip(waiting, overlapped, strict=True)]
        p20, p50, p80 = (round(value, 4) for value in percentiles(ratios))
        rows.append(
            {
                **before,
                "figure": f"not overlapped over overlapped, {case}",
                "p20": p20,
                "p50": p50,
                "p80": p80,
                "n": len(ratios),
                "bar": BARS[case],
                "overlapped_s": round(statistics.median(step_s for step_s, _ in overlapped), 4),
                "not_overlapped_s": round(statistics.median(step_s for step_s, _ in waiting), 4),
                "adam_share": round(statistics.median(adam_s / step_s for step_s, adam_s in waiting), 3),
                "tokens": answer["batch"] * SEQUENCE,
                "link_bytes_per_s": answer["link_bytes_per_s"],
            }
        )
        bar = BARS[case]
        missed += [case] if bar is not None and p50 < bar else []
    columns = ("figure", "p20", "p50", "p80", "n", "bar", "overlapped_s", "not_overlapped_s", "adam_share", "tokens")
    print_table("Steps with states on the host", columns, [[row[column] for column in columns] for row in rows])
    if not args.no_record:
        print(append_rows("overlap_speed", rows))
    if missed:
        print(f"missed: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
