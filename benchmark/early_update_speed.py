"""Steps whose gradients are clipped, or may be, with early updates and without.

    python benchmark/early_update_speed.py [--rounds 15] [--no-record]

The runtime's CPU backend, links emulated, as in `overlap_speed`, with its model, and batch and link that it sets so
that Adam is a third of a step that waits. All weights are resident, all states on the host. Four ways take turns:

* *kept*: the plan updates all chunks early, gradients are to be clipped, and never reach the norm;
* *redone*: the same, but they are clipped in every step, so that all states would be made twice;
* *today*: new states are made after the norm, while the next forward computes; clipped in every step, or never;
* *waiting*: the same, and the step waits for them.

Ratios are medians over rounds. Every way begins with `WARM` steps, in which the forecast sees whether gradients are
clipped. Appends to ``results/early_update_speed.csv``; fails if a bar is missed.
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
from benchmark.emulated_runs import run_apart  # noqa: E402
from benchmark.overlap_speed import LINK_SHARE, SEQUENCE, chosen_batch, made  # noqa: E402

NEVER, ALWAYS = 1e9, 1e-6
"""Norms to clip to that no gradient reaches, and that each exceeds."""
WARM = 3
"""Steps after a change of the way: the forecast looks at two, and updates of the step before began in another way."""


class Way(NamedTuple):
    """How a step is run."""

    plan: str
    max_norm: float
    waits: bool = False


KEPT, REDONE = Way("early", NEVER), Way("early", ALWAYS)
TODAY, WAITING = Way("today", ALWAYS), Way("today", NEVER, waits=True)
RATIOS = {
    "waiting over kept": (WAITING, KEPT, 1.25),
    "today over redone": (TODAY, REDONE, 0.98),
}
"""Seconds of the first way over those of the second, and the bar."""
PLANS: dict[str, dict[str, bool]] = {
    "early": {"early_updates": True, "clipping": True},
    "today": {"clipping": True},
}
"""Settings of plans."""


def turns(rounds: int) -> dict[str, Any]:
    """Seconds of a step, those of Adam, and chunks whose early states were kept, by way, of every round."""
    batch, adam_s = chosen_batch()
    print(f"batch of {batch} x {SEQUENCE} tokens, {adam_s:.3f} s of Adam", file=sys.stderr)
    runs = {name: made(batch, **setting) for name, setting in PLANS.items()}
    speed = sum(chunk.weight_bytes for chunk in runs["today"].plan.chunks) / (LINK_SHARE * adam_s)
    for run in runs.values():
        run.link(speed, speed)
    ways = (KEPT, REDONE, TODAY, WAITING)
    found: dict[Way, list[tuple[float, float, int]]] = {way: [] for way in ways}
    for turn in range(rounds):
        for index in range(len(ways)):
            way = ways[(index + turn) % len(ways)]
            run = runs[way.plan]
            run.optimizer.max_norm = way.max_norm
            for _ in range(WARM):
                run.step(settle=way.waits)
            step = run.step(settle=way.waits)
            found[way].append((step.step_s, step.report.busy_s["host_adam"], step.report.early.kept))
    _check(found)
    for run in runs.values():
        run.module.settle()
        run.module.close()
    seconds = {name: [found[one], found[other]] for name, (one, other, _) in RATIOS.items()}
    return {"batch": batch, "link_bytes_per_s": round(speed), "seconds": seconds}


def _check(found: dict[Way, list[tuple[float, float, int]]]) -> None:
    """Whether the runs did what they are named after."""
    if not all(kept for _, _, kept in found[KEPT]) or any(kept for _, _, kept in found[REDONE]):
        raise SystemExit("early updates were not kept where nothing was clipped, or were where all was")


def ratio_rows(answer: dict[str, Any], before: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for every ratio, and the names of those that miss their bar."""
    rows, missed = [], []
    for name, (slower, faster) in answer["seconds"].items():
        ratios = [one[0] / other[0] for one, other in zip(slower, faster, strict=True)]
        p20, p50, p80 = (round(value, 4) for value in percentiles(ratios))
        bar = RATIOS[name][2]
        missed += [name] if p50 < bar else []
        row = {**before, "figure": name, "p20": p20, "p50": p50, "p80": p80, "n": len(ratios), "bar": bar}
        for which, steps in (("first", slower), ("second", faster)):
            row[f"{which}_s"] = round(statistics.median(step[0] for step in steps), 4)
            row[f"{which}_adam_s"] = round(statistics.median(step[1] for step in steps), 4)
        rows.append(row | {"tokens": answer["batch"] * SEQUENCE, "link_bytes_per_s": answer["link_bytes_per_s"]})
    return rows, missed


def main() -> int:
    """Runs, records, and compares with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", metavar="ROUNDS", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(turns(args.work)))
        return 0
    os.environ["ELIXIR_COMPILE"] = "wait"  # no step may differ by when the compiler was done
    before = conditions() | {"threads": 1}
    rows, missed = ratio_rows(run_apart(__file__, str(args.rounds)), before)
    columns = ("figure", "p20", "p50", "p80", "n", "bar", "first_s", "second_s", "first_adam_s", "second_adam_s")
    print_table("Steps whose gradients may be clipped", columns, [[row[column] for column in columns] for row in rows])
    if not args.no_record:
        print(append_rows("early_update_speed", rows))
    if missed:
        print(f"missed: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
