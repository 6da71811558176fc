"""The gain of running the host's Adam during compute: steps that do not wait for it, and steps that do.

    python benchmark/overlap_speed.py [--rounds 15] [--no-record]

One rank on the runtime's CPU backend: one thread computes, one steps on the host, links are emulated. All weights of an
OPT-like model (8 layers of 768, float32) are resident, all states on the host, so every gradient goes down the link and
every new weight comes up. Adam keeps its moments in bfloat16 and is compiled: what it computes takes long enough to be
a third of a step that is more than copies, and it asks little of the memory that compute uses too, which on a machine
with a GPU it would not share. Ways of running a step take turns, round after round:

* *overlapped*: Adam runs during the next forward, with gradients that are clipped and without;
* *not overlapped*: the step waits after `optimizer.step()` until all new weights are on the device; everything else is
  the same run of the same module;
* *kept*: the plan updates all chunks early, gradients are to be clipped, and never reach the norm;
* *redone*: the same, but they are clipped in every step, so that all states would be made twice;
* *today* and *waiting*: as the first two, under a plan that counts on clipping.

A figure is the median over rounds of the seconds of one way over those of another. Every turn begins with steps that
are not measured: updates of the step before began in another way, and the forecast sees whether gradients are clipped.

Set by measurements in the same process, before anything is judged:

* the batch, so that Adam is a third of the step that waits: compute is measured at two batches, Adam by the lane's busy
  seconds, and compute should take twice as long (the rows have Adam's share);
* the link, so that gradients, and likewise new weights, take half as long as Adam.

Appends to ``results/overlap_speed.csv``, and figures of early updates to ``results/early_update_speed.csv``; fails where
a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

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
NEVER, ALWAYS = 1e9, 1e-6
"""Norms to clip to that no gradient reaches, and that each exceeds."""
WARM, TRIES = 3, 5
PLANS: dict[str, dict[str, bool]] = {
    "plain": {},
    "today": {"clipping": True},
    "early": {"early_updates": True, "clipping": True},
}
"""Settings of plans."""


class Way(NamedTuple):
    """How a step is run."""

    plan: str
    max_norm: float
    waits: bool = False


class Figure(NamedTuple):
    """Seconds of the first way over those of the second, and the bar."""

    slower: Way
    faster: Way
    bar: float | None


KEPT, REDONE = Way("early", NEVER), Way("early", ALWAYS)
FIGURES = {
    "overlap_speed": {
        "not overlapped over overlapped, with clipping": Figure(Way("plain", 1.0, True), Way("plain", 1.0), 1.15),
        "not overlapped over overlapped, without clipping, during forward only": Figure(
            Way("plain", 0.0, True), Way("plain", 0.0), None
        ),
    },
    "early_update_speed": {
        "waiting over kept": Figure(Way("today", NEVER, True), KEPT, 1.25),
        "today over redone": Figure(Way("today", ALWAYS), REDONE, 0.98),
    },
}
"""Figures by the file of their rows."""


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
    """Seconds of a step, and those of Adam, by figure and way, in every round."""
    batch, adam_s = chosen_batch()
    print(f"batch of {batch} x {SEQUENCE} tokens, {adam_s:.3f} s of Adam", file=sys.stderr)
    runs = {name: made(batch, **setting) for name, setting in PLANS.items()}
    speed = sum(chunk.weight_bytes for chunk in runs["plain"].plan.chunks) / (LINK_SHARE * adam_s)
    for run in runs.values():
        run.link(speed, speed)
    figures = {name: figure for file in FIGURES.values() for name, figure in file.items()}
    ways = list(dict.fromkeys(way for figure in figures.values() for way in figure[:2]))
    found: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways}
    kept: dict[Way, set[bool]] = {way: set() for way in ways}
    for turn in range(rounds):
        for index in range(len(ways)):
            way = ways[(index + turn) % len(ways)]
            run = runs[way.plan]
            run.optimizer.max_norm = way.max_norm
            for _ in range(WARM):
                run.step(settle=way.waits)
            step = run.step(settle=way.waits)
            found[way].append((step.step_s, step.report.busy_s["host_adam"]))
            kept[way].add(step.report.early.kept > 0)
    if (kept[KEPT], kept[REDONE]) != ({True}, {False}):
        raise SystemExit("early updates were not kept where nothing was clipped, or were where all was")
    for run in runs.values():
        run.module.settle()
        run.module.close()
    steps = {name: [found[way] for way in figure[:2]] for name, figure in figures.items()}
    return {"batch": batch, "link_bytes_per_s": round(speed), "steps": steps}


def row_of(file: str, name: str, answer: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A figure as a row of its file."""
    slower, faster = answer["steps"][name]
    ratios = [one[0] / other[0] for one, other in zip(slower, faster, strict=True)]
    p20, p50, p80 = (round(value, 4) for value in percentiles(ratios))
    slower_s, faster_s = (round(statistics.median(step_s for step_s, _ in steps), 4) for steps in (slower, faster))
    row = {**before, "figure": name, "p20": p20, "p50": p50, "p80": p80, "n": len(ratios)}
    row["bar"] = FIGURES[file][name].bar
    if file == "overlap_speed":
        share = round(statistics.median(adam_s / step_s for step_s, adam_s in slower), 3)
        row |= {"overlapped_s": faster_s, "not_overlapped_s": slower_s, "adam_share": share}
    else:
        for which, step_s, steps in (("first", slower_s, slower), ("second", faster_s, faster)):
            row |= {f"{which}_s": step_s, f"{which}_adam_s": round(statistics.median(adam for _, adam in steps), 4)}
    return row | {"tokens": answer["batch"] * SEQUENCE, "link_bytes_per_s": answer["link_bytes_per_s"]}


def main() -> int:
    """Runs, records, and compares with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", metavar="ROUNDS", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work)))
        return 0
    before = conditions() | {"threads": 1}
    os.environ["ELIXIR_COMPILE"] = "wait"  # no step may differ by when the compiler was done
    answer, missed = run_apart(__file__, str(args.rounds)), []
    for file, figures in FIGURES.items():
        rows = [row_of(file, name, answer, before) for name in figures]
        missed += [row["figure"] for row in rows if row["bar"] is not None and row["p50"] < row["bar"]]
        columns = [name for name in rows[0] if name not in before]
        print_table("Steps with states on the host", columns, [[row[name] for name in columns] for row in rows])
        if not args.no_record:
            print(append_rows(file, rows))
    if missed:
        print(f"missed: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
