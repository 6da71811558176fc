"""Simulated seconds of the golden plans in every scenario, so that a search that finds other plans shows that none is slower.

    python tools/golden_seconds.py                 compares with benchmark/results/golden_seconds.json; status 1 if any is slower
    python tools/golden_seconds.py --write         records them anew; a commit that does so says why
    python tools/golden_seconds.py --keep FOLDER   writes the plans there, too
    python tools/golden_seconds.py --than FOLDER   compares with the plans that `--keep` wrote there, simulated by today's simulator

A case is a ``plan`` of `golden_plans`. It is planned twice: for the rates of the profile, and for all that the profile thinks possible.
The first plan may take `NOMINAL` times the recorded seconds. The second one may take `EACH` times these in each scenario. After a change of
the simulator recorded seconds say nothing: compare with the plans of the commit before, which both simulators can read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

from elixir.cli import main as elixir
from elixir.hardware.scenario import Scenario, scenarios
from elixir.plan.plan import Plan
from elixir.search import searches
from elixir.search.planner import plan_or_shortage
from elixir.search.question import Question
from elixir.search.simulator.simulation import simulate_step
from elixir.tracer.device import cpu_target
from tools.golden_plans import CASES

RECORDED = Path(__file__).parent.parent / "benchmark" / "results" / "golden_seconds.json"
NOMINAL, EACH = 1.005, 1.02
"""Seconds over the recorded ones that a plan may take: at the rates of the profile, and in each scenario."""
DIGITS = 8
PLANS = tuple(case for case in CASES if case.startswith("plan ") and "--disk-memory" not in case)
"""All but the one that ends with an error: no preset knows how fast its disk is."""

Seconds = dict[str, dict[str, float]]
"""Seconds by scenario, of ``nominal``, the plan for the rates of the profile, and ``robust``, the one for all scenarios."""


class _Asked(Exception):
    """The question of a command line, which goes no further."""


def question(case: str) -> Question:
    """The question of one command line to the planner."""

    found: list[Question] = []

    def ask(asked: Question, **_: object) -> NoReturn:
        found.append(asked)
        raise _Asked

    # What kernels allocate differs between processors.
    unasked = patch.object(cpu_target, "MAX_RUN_FLOPS", 0.0)
    with unasked, patch.object(searches, "plan_or_shortage", ask):
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with quiet[0], quiet[1], contextlib.suppress(_Asked, SystemExit):  # the command ends with any error
            elixir(case.split())
    if not found:
        raise SystemExit(f"elixir {case} asks the planner nothing")
    return found[0]


def plans(asked: Question) -> dict[str, Plan]:
    """The plan for the rates of the profile, and that for all scenarios."""
    return {"nominal": plan_or_shortage(asked.nominal), "robust": plan_or_shortage(asked)}


def seconds(made: dict[str, Plan], asked: Question) -> Seconds:
    """Simulated seconds of the nominal plan at the profile's rates, and of the robust one in every scenario."""
    trace, hardware, _ = asked
    possible = scenarios(hardware, clips=True)

    def taken(plan: Plan, scenario: Scenario) -> float:
        return round(simulate_step(plan, trace, scenario.machine(hardware), clipped=scenario.clipped).step_s, DIGITS)

    robust = {str(scenario): taken(made["robust"], scenario) for scenario in possible}
    return {"nominal": {str(possible[0]): taken(made["nominal"], possible[0])}, "robust": robust}


def slower(case: str, before: Seconds, now: Seconds) -> list[str]:
    """Says of which plans a step takes longer than it may."""
    found = []
    for kind, most in (("nominal", NOMINAL), ("robust", EACH)):
        for scenario, was_s in before[kind].items():
            ratio = now[kind][scenario] / was_s
            if ratio > most:
                found.append(
                    f"slower: {case}\n  {kind} plan, {scenario}: {now[kind][scenario]} s, {ratio:.4f} of {was_s} s"
                )
    return found


def path(folder: Path, case: str, kind: str) -> Path:
    """The file of a plan in a folder."""
    return folder / f"{PLANS.index(case):02}-{re.sub(r'[^a-z0-9.]+', '-', case[5:60].lower())}-{kind}.json"


def main() -> int:
    """Plans, simulates, and compares or records; 1 if a plan is slower than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the seconds anew")
    parser.add_argument("--keep", type=Path, help="a folder for the plans")
    parser.add_argument("--than", type=Path, help="a folder with the plans to compare with")
    parser.add_argument("--only", default="", help="cases that contain this text")
    args = parser.parse_args()
    recorded: dict[str, Seconds] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    missed, ratios = [], []
    for case in (case for case in PLANS if args.only in case):
        asked = question(case)
        made = plans(asked)
        now = seconds(made, asked)
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            for kind, plan in made.items():
                path(args.keep, case, kind).write_text(plan.to_json())
        if args.write:
            recorded[case] = now
            continue
        if args.than is not None:
            kept = {kind: Plan.from_json(path(args.than, case, kind).read_text()) for kind in made}
            recorded[case] = seconds(kept, asked)
        before = recorded[case]
        missed += slower(case, before, now)
        ratios.append([now[kind][each] / was_s for kind in before for each, was_s in before[kind].items()])
        print(
            f"{ratios[-1][0]:.4f} nominal, {min(ratios[-1][1:]):.4f} to {max(ratios[-1][1:]):.4f} robust: {case}",
            flush=True,
        )
    if args.write:
        RECORDED.write_text(json.dumps({case: recorded[case] for case in PLANS if case in recorded}, indent=1) + "\n")
        print(f"{len(recorded)} cases recorded in {RECORDED}")
        return 0
    for line in missed:
        print(line)
    print(f"{len(ratios)} cases, {len(missed)} plans slower in a scenario than they may be")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
