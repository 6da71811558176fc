"""Regret of plans where the machine is not as its preset says: chosen plans, against the best that are known.

    python benchmark/regret.py [--only TEXT] [--add NAME] [--no-record]

Each of 12 situations has eight scenarios: CPU Adam as the preset says or 0.3 of that, links likewise or 0.6 of that, no
step clipped or every one. In each, the regret of a plan is its simulated seconds over those of the best plan known, less
1. Known are the chosen plan, the search's own plan for each scenario, and the plans of the pool (``regret_pool/``), which
only grows: `--add` puts the chosen plans there under a name, such as a commit.

The last row is OPT-1.3B with room for all on an H200: the chosen plan if every step is clipped, over one that leaves
nothing to the host.

Appends the rows to ``results/regret.csv``. Fails if a bar is missed.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions, print_table
from benchmark.situations import SITUATIONS, Situation, trace
from elixir.errors import PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.scenario import SLOW_HOST_ADAM, SLOW_LINK, Scenario
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.request import SearchRequest
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace

POOL = Path(__file__).parent / "regret_pool"
MEDIAN_BAR, WORST_BAR, NEAR_LEAST = 0.03, 0.10, 0.01
"""Bars of the worst regrets. One above the second may be so much above the least of the pool."""
RESIDENT_BAR = 1.02
SCENARIOS = tuple(
    Scenario(host_adam, link, clipped)
    for clipped, link, host_adam in itertools.product((False, True), (1.0, SLOW_LINK), (1.0, SLOW_HOST_ADAM))
)
CHOSEN = {
    name: SITUATIONS[name]
    for name in (
        "Llama-3-8B, 4090",
        "Llama-2-13B, A100",
        "OPT-13B, H200",
        "GPT-2 XL, 3090 with 12 GiB",
        "Llama-3-8B, 8 x 4090",
        "Llama-3-70B, 8 x H100",
        "Mixtral-8x7B, 8 x A100",
    )
} | {
    "OPT-30B, 16 x A100-40": Situation("opt-30b", "a100-40gb", 16, 4, 2048, "512GiB", per_host=8),
    "Llama-2-70B, 32 x H100": Situation("llama-2-70b", "h100", 32, 2, 4096, "2TiB", per_host=8),
    "OPT-175B, 64 x H100": Situation("opt-175b", "h100", 64, 4, 2048, "2TiB", per_host=8),
    "OPT-175B, 64 x H100, batch 8": Situation("opt-175b", "h100", 64, 8, 2048, "2TiB", per_host=8),
    "OPT-175B, 128 x A100": Situation("opt-175b", "a100", 128, 4, 2048, "1TiB", per_host=8),
}
"""One rank to 128, memory short in each."""
RESIDENT = "OPT-1.3B, H200, all fits"


def request(it: Situation) -> SearchRequest:
    """The question to the planner."""
    return SearchRequest.of(it.ranks, host_budget=it.host_memory, device_memory=it.device_memory, clipping=True)


def folder_of(name: str) -> Path:
    """The plans of a situation in the pool."""
    return POOL / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def pooled(name: str) -> dict[str, Plan]:
    """The plans of the pool, by the names under which they were added."""
    files = sorted(folder_of(name).glob("*.json.gz"))
    return {
        path.name.removesuffix(".json.gz"): Plan.from_json(gzip.decompress(path.read_bytes()).decode())
        for path in files
    }


def add(name: str, kind: str, plan: Plan) -> None:
    """Adds a plan to the pool."""
    path = folder_of(name) / f"{kind}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(plan.to_json().encode(), mtime=0))


def own_plans(it: Situation, step: StepTrace) -> dict[str, Plan]:
    """The search's plan for each scenario alone."""
    found = {}
    for scenario in SCENARIOS:
        # States made early are of no use where each step is clipped.
        options = {"early_updates": False} if scenario.clipped else {}
        machine = scenario.machine(it.hardware)
        try:
            found[str(scenario)] = plan_from_trace(step, machine, request(it), assume="nominal", **options).plan
        except PlanError:
            continue
    return found


def seconds(plan: Plan, step: StepTrace, hardware: HardwareProfile) -> dict[Scenario, float]:
    """Seconds in each scenario; without early updates, clipping is all the same."""
    found: dict[Scenario, float] = {}
    for scenario in SCENARIOS:
        kept = Scenario(scenario.host_adam, scenario.link)
        if scenario.clipped and not plan.has_early_updates:
            found[scenario] = found[kept]
        else:
            machine = scenario.machine(hardware)
            found[scenario] = simulate_step(plan, step, machine, clipped=scenario.clipped).step_s
    return found


def judged(name: str, adding: str = "") -> Row:
    """One situation."""
    it = CHOSEN[name]
    step, hardware, began_s = trace(it), it.hardware, time.process_time()
    plan = plan_from_trace(step, hardware, request(it)).plan
    cpu_s = time.process_time() - began_s
    if adding:
        add(name, adding, plan)
    known = {"chosen": plan, **pooled(name), **own_plans(it, step)}
    taken = {kind: seconds(each, step, hardware) for kind, each in known.items()}
    best_s = {scenario: min(each[scenario] for each in taken.values()) for scenario in SCENARIOS}
    regrets = {kind: max(each[s] / best_s[s] - 1 for s in SCENARIOS) for kind, each in taken.items()}
    worst = max(SCENARIOS, key=lambda scenario: taken["chosen"][scenario] / best_s[scenario])
    least = min(regrets, key=lambda kind: regrets[kind])
    numel = sum(chunk.numel for chunk in plan.chunks if chunk.trainable)
    hosted = sum(chunk.numel for chunk in plan.chunks if chunk.trainable and chunk.state_home == "host")
    stated = max((each.regret for each in plan.predicted.judgements), default=0.0)
    return {
        "situation": name,
        "ranks": it.ranks,
        "states_on_host": round(hosted / numel, 3),
        "nominal_s": round(plan.predicted.step_s, 4),
        "nominal_over_best": round(taken["chosen"][SCENARIOS[0]] / best_s[SCENARIOS[0]], 5),
        "regret_percent": round(100 * regrets["chosen"], 2),
        "in_scenario": f"Adam {worst.host_adam:g}, links {worst.link:g}{', clipped' * worst.clipped}",
        "stated_percent": round(100 * stated, 2),
        "least_percent": round(100 * regrets[least], 2),
        "least_plan": least,
        "plans": len(known),
        "cpu_s": round(cpu_s, 2),
    }


def resident_ratio() -> float:
    """Seconds of a clipped step of OPT-1.3B with room for all, over those of a plan without offload."""
    it = Situation("opt-1.3b", "h200", 1, 8, 1024, "256GiB")
    step, clipped = trace(it), Scenario(clipped=True)
    chosen = plan_from_trace(step, it.hardware, request(it)).plan
    whole = plan_from_trace(step, it.hardware, request(it), placement="cuda", early_updates=False).plan
    return seconds(chosen, step, it.hardware)[clipped] / seconds(whole, step, it.hardware)[clipped]


def missed(rows: list[Row]) -> list[str]:
    """The bars that are missed."""
    found = [
        f"{row['situation']}: {row['regret_percent']} %, least in the pool {row['least_percent']} %"
        for row in rows
        if row["regret_percent"] > 100 * max(WORST_BAR, row["least_percent"] / 100 + NEAR_LEAST)
    ]
    median = statistics.median(row["regret_percent"] for row in rows)
    return found + ([f"median {median} %"] if median > 100 * MEDIAN_BAR else [])


def main() -> int:
    """Plans, compares, records; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="situations that contain this text")
    parser.add_argument("--add", default="", help="add the chosen plans to the pool under this name")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    before, rows = conditions(), []
    for name in (each for each in CHOSEN if args.only in each):
        rows.append(judged(name, args.add))
        print(rows[-1], file=sys.stderr, flush=True)
    found = missed(rows) if rows else []
    if args.only in RESIDENT:
        ratio = resident_ratio()
        print(f"{RESIDENT}, every step clipped: {ratio:.4f} of a plan without offload (bar {RESIDENT_BAR})")
        found += [RESIDENT] if ratio > RESIDENT_BAR else []
        rows.append(
            dict.fromkeys(rows[0] if rows else (), "") | {"situation": RESIDENT, "nominal_over_best": round(ratio, 5)}
        )
    print_table("regret", list(rows[0]), [list(each.values()) for each in rows])
    if not args.no_record:
        print(append_rows("regret", [{**before, **each} for each in rows]))
    for each in found:
        print(f"missed: {each}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
