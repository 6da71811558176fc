"""The time that clipping adds to a step whose gradients leave for the host.

    python benchmark/clipping_cost.py [--rounds 9] [--against FOLDER] [--no-record]

One rank on the runtime's CPU backend: one thread computes, one more works for each lane, links are emulated. All
weights and states of an OPT-like model (float32, 400 MB of gradients) are on the host, so every gradient goes down the
link. The same module steps with and without ``max_norm``; the two take turns, round after round, and in each turn only
the second step counts. A step lasts from its zero_grad() to the end of step(), so it includes what the update before
makes it wait for. The first figure is the median over rounds of the seconds that clipping adds in a round, over the
median seconds of a step without. It is a small difference of large numbers, so it wants a quiet machine. The second
figure does not: the seconds in which step() does nothing but find the norm, from the moment at which all gradients are
at home, over a step without.

The emulated link takes its time from the moment at which a copy begins. The norm is summed by the thread that copies,
so its seconds count as the link's as long as the link is slower, as a GPU's would while its copy engine works.

With ``--against``, the checkout of another version in FOLDER runs the same rounds, in turns with this one.

Appends to ``results/clipping_cost.csv``; fails where the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from elixir.wrapper.engine import engine_of

ROOT = Path(__file__).resolve().parent.parent
if "--root" in sys.argv:  # a separate process, which measures another version
    sys.path.insert(0, sys.argv[sys.argv.index("--root") + 1])
else:
    sys.path.insert(0, str(ROOT))

GRADIENT_BYTES = 400e6
LINK_BYTES_PER_S = 1e9
"""Each way. In backward the link is then about as busy as compute on one core is."""
BATCH, SEQUENCE = 1, 64
MAX_NORM = 1.0
BAR = 0.1
"""Most that clipping may add, over the step without."""
SHARE = 3
"""Rounds of one version before the other's turn."""


def work(rounds: int) -> list[tuple[float, float, float]]:
    """Seconds of a step with clipping, of one without, and of the norm alone, per round."""
    from benchmark.emulated_runs import SHAPES, Run, mixed_plans
    from elixir.hardware.profile import preset
    from elixir.models.loading import build
    from elixir.models.step import default_input
    from elixir.tracer.trace import trace_step

    shape = SHAPES["opt"][0].changed(name="opt 13x768", layers=13, vocabulary=8192)
    meta = build(shape, device="meta")
    inp = default_input(meta, batch=BATCH, seq=SEQUENCE)
    machine = preset("cpu")
    trace = trace_step(meta, inp, lambda m, i: m(**i).loss.backward(), hardware=machine, optimizer=None)
    (plan,) = mixed_plans(trace, machine, ("streamed",))
    found_bytes = sum(chunk.numel * 4 for chunk in plan.chunks if chunk.trainable)
    if not 0.9 < found_bytes / GRADIENT_BYTES < 1.1:
        raise SystemExit(
            f"the model has {found_bytes / 1e6:.0f} MB of gradients, {GRADIENT_BYTES / 1e6:.0f} were meant"
        )
    run = Run(shape, inp, plan, host_threads=1)
    run.link(LINK_BYTES_PER_S, LINK_BYTES_PER_S)
    run.step()  # moments are made
    answers = []
    for turn in range(rounds):
        seconds = {}
        for max_norm in (MAX_NORM, 0.0) if turn % 2 else (0.0, MAX_NORM):
            run.optimizer.max_norm = max_norm
            seconds[max_norm] = statistics.median(step.step_s for step in run.turn())
        answers.append((seconds[MAX_NORM], seconds[0.0], norm_seconds(run)))
    run.module.close()
    return answers


def norm_seconds(run: Any) -> float:
    """Seconds that a step takes for the norm after all gradients have come home."""
    optimizer, found = run.optimizer, []
    engine = engine_of(optimizer.module)
    stepper: Any = engine.steppers[0]
    find = stepper.norm

    def timed() -> Any:
        engine.gradients._wait()  # for what clipping does not add
        started = time.perf_counter()
        norm = find()
        found.append(time.perf_counter() - started)
        return norm

    optimizer.max_norm, stepper.norm = MAX_NORM, timed
    run.turn()
    del stepper.norm
    return float(found[-1])


def run_version(root: Path, rounds: int) -> list[list[float]]:
    """`work` in a separate process, by the version in `root`."""
    from benchmark.emulated_runs import KEEP_FREED

    environment = (
        os.environ | KEEP_FREED | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    )
    command = [sys.executable, __file__, "--work", str(rounds), "--root", str(root)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{root} could not be measured")
    answers: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def commit_of(root: Path) -> str:
    """The commit that is checked out there."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Runs, records, and holds this version against the bar; 1 where it is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work)))
        return 0
    from benchmark.common import append_rows, conditions, percentiles, print_table

    before = conditions() | {"threads": 1}
    versions = {"this version": ROOT} | ({"against": args.against.resolve()} if args.against else {})
    found: dict[str, list[list[float]]] = {name: [] for name in versions}
    while min(map(len, found.values())) < args.rounds:
        for name, root in versions.items():
            found[name] += run_version(root, min(SHARE, args.rounds))
    figures = {
        "seconds that clipping adds": {name: [step[0] - step[1] for step in steps] for name, steps in found.items()},
        "seconds of the norm alone": {name: [step[2] for step in steps] for name, steps in found.items()},
    }
    rows: list[dict[str, Any]] = []
    for figure, by_version in figures.items():
        for name, seconds in by_version.items():
            clipped_s, plain_s, _ = (statistics.median(values) for values in zip(*found[name], strict=True))
            p20, p50, p80 = (round(value / plain_s, 4) for value in percentiles(seconds))
            before_s = statistics.median(by_version["against"]) if "against" in by_version else None
            rows.append(
                {
                    **before,
                    "version": name if name == "this version" else commit_of(versions[name]),
                    "figure": f"{figure}, over a step without",
                    "p20": p20,
                    "p50": p50,
                    "p80": p80,
                    "n": len(seconds),
                    "bar": BAR if name == "this version" else None,
                    "clipped_s": round(clipped_s, 4),
                    "unclipped_s": round(plain_s, 4),
                    "figure_s": round(statistics.median(seconds), 4),
                    "over_other_version": None if before_s is None else round(statistics.median(seconds) / before_s, 3),
                    "link_bytes_per_s": round(LINK_BYTES_PER_S),
                }
            )
    columns = ("figure", "version", "p20", "p50", "p80", "n", "bar", "unclipped_s", "figure_s", "over_other_version")
    print_table("Clipping where gradients leave for the host", columns, [[row[key] for key in columns] for row in rows])
    if not args.no_record:
        print(append_rows("clipping_cost", rows))
    missed = [row["figure"] for row in rows if row["bar"] is not None and row["p50"] > row["bar"]]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
