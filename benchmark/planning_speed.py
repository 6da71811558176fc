"""How long planning takes, compared with another version of Elixir in turns; the levers of a plan; and saying no.

    python benchmark/planning_speed.py --other DIR [--turns 3] [--only plan no] [--no-record]

`DIR` is a checkout of the other version. Each turn is a process of either version, by processor time, which waits for
nobody; a version traces the step of OPT-175B itself. Parts:

* ``trace``: `trace_step` of one step; ``plan``: `plan_from_trace` at 1, 8 and 64 ranks, with the trace given, for all
  scenarios of the machine, and ``nominal``: the same with `assume` as ``"nominal"``. A version that knows no scenarios
  plans at nominal rates for both;
* ``levers``: `Answer.levers()` after the plan of a smaller model; ``no``: an infeasible request with its advice. The
  other version has neither, or not the same, so these stand alone.

Appends to ``results/planning_speed.csv``: p20, p50 and p80 of all runs, and the median over that of the other version.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

RUNS = 3
"""How often each is measured in one process; the first time counts as well."""
WORLD_SIZES = (1, 8, 64)
BARS_S = {"trace": 0.35, "plan": 4.0, "nominal": 4.0, "levers": 5.0, "no": 3.0}
RATIO_BARS = {"trace": 1.0, "plan": 3.0, "nominal": 1.0}
"""The code that the other version runs as well, over it."""
ASKED = ("levers", "no")


def timed(function: Callable[[], Any]) -> float:
    """Processor seconds of one call."""
    started = time.process_time()
    function()
    return time.process_time() - started


def work(parts: list[str]) -> dict[str, list[float]]:
    """Seconds by measurement, in a process of one version; only names that either version has."""
    import inspect

    import torch

    from elixir.hardware import preset
    from elixir.models import build, default_input, default_step
    from elixir.search import plan_from_trace
    from elixir.search.request import SearchRequest
    from elixir.tracer import trace_step

    def step(name: str, batch: int, seq: int, card: str, **options: Any) -> Any:
        model = build(name, dtype=torch.bfloat16, checkpoint="non-reentrant", device="meta")
        inp, hardware = default_input(model, batch=batch, seq=seq), preset(card)
        return lambda: trace_step(
            model, inp, default_step, dtype=torch.bfloat16, hardware=hardware, model_name=name, **options
        )

    found: dict[str, list[float]] = {}
    knows_scenarios = "assume" in inspect.signature(SearchRequest).parameters
    ways = {"plan": {}, "nominal": {"assume": "nominal"} if knows_scenarios else {}}
    if {"trace", *ways} & set(parts):
        trace_once = step("opt-175b", 8, 2048, "h200")
        trace = trace_once()
        if "trace" in parts:
            found["trace opt-175b"] = [timed(trace_once) for _ in range(RUNS)]
        for way, ranks in itertools.product((way for way in ways if way in parts), WORLD_SIZES):
            found[f"{way} opt-175b on {ranks}"] = [
                timed(lambda n=ranks, o=ways[way]: plan_from_trace(trace, preset("h200"), n, host_budget="64TiB", **o))
                for _ in range(RUNS)
            ]
    if "levers" in parts:
        small = step("opt-1.3b", 4, 1024, "a100")()
        plan = plan_from_trace(small, preset("a100"), 1, device_memory="12GiB", host_budget="64GiB")
        found["levers opt-1.3b"] = [timed(plan.levers)]
    if "no" in parts:
        large = step("llama-3-8b", 2, 2048, "rtx4090")()
        found["no llama-3-8b"] = [timed(lambda: refused(plan_from_trace, large, preset("rtx4090")))]
    return found


def refused(plan_from_trace: Any, trace: Any, hardware: Any) -> None:
    """Asks for what does not fit."""
    from elixir.errors import PlanError

    try:
        plan_from_trace(trace, hardware, 1, host_budget="64GiB")
    except PlanError:
        return
    raise RuntimeError("this request was to be refused")


def turn(folder: Path, parts: list[str]) -> dict[str, list[float]]:
    """One process of the version in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--work", *parts]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{folder} failed:\n{done.stderr[-2000:]}")
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure in turns; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="checkout of another version")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=sorted(BARS_S), default=sorted(BARS_S))
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        print(json.dumps(work(args.work)))
        return 0
    sys.path.insert(0, str(ROOT))
    from benchmark.common import append_rows, conditions, percentiles, print_table

    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    shared = [part for part in args.only if part not in ASKED]
    began = conditions()
    for _ in range(args.turns):
        for folder, parts, into in ((args.other, shared, theirs), (ROOT, args.only, ours)):
            for name, seconds in turn(folder, parts).items() if folder and parts else ():
                into.setdefault(name, []).extend(seconds)
    rows, missed = [], 0
    for name, seconds in ours.items():
        ratio = statistics.median(seconds) / statistics.median(theirs[name]) if name in theirs else None
        part = name.split()[0]
        bar_s = BARS_S[part]
        missed += statistics.median(seconds) > bar_s or (ratio is not None and ratio > RATIO_BARS[part])
        low, middle, high = (round(value, 3) for value in percentiles(seconds))
        rows.append(
            {
                "what": name,
                "cpu_p20_s": low,
                "cpu_p50_s": middle,
                "cpu_p80_s": high,
                "bar_s": bar_s,
                "other": args.other.name if args.other and name in theirs else "",
                "other_cpu_p50_s": round(statistics.median(theirs[name]), 3) if name in theirs else "",
                "ratio": "" if ratio is None else round(ratio, 3),
                "n": len(seconds),
                **began,
            }
        )
    columns = ("what", "cpu_p20_s", "cpu_p50_s", "cpu_p80_s", "bar_s", "other_cpu_p50_s", "ratio", "n")
    print_table("planning", columns, [[row[name] for name in columns] for row in rows])
    if not args.no_record:
        append_rows("planning_speed", rows)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
