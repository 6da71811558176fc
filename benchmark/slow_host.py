"""Regret where CPU Adam is slower than the preset says: chosen plans, against the best plans known for such a host.

    python benchmark/slow_host.py [--only TEXT] [--no-record]

A plan is made for each situation with the rates of the preset, and again for the same machine with CPU Adam x 0.3, as
users report it. Both are simulated there. Known are these two, everything gathered on the device, and plans for
ever smaller parts of the host's memory, which the planner made for the slow machine too. Regret is the seconds of the
first plan, over those of the fastest, less 1. Shown with it are the seconds of the chosen plan over those of the
fastest plan at the preset's rates, `nominal_over_fastest`.

Appends the rows to ``results/slow_host.csv``. Fails if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions, print_table
from benchmark.situations import SITUATIONS, Situation, trace
from elixir.errors import PlanError
from elixir.hardware import HardwareProfile, Scenario
from elixir.hardware.scenario import SLOW_HOST_ADAM
from elixir.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.planner import plan_or_shortage
from elixir.search.request import SearchRequest
from elixir.search.simulator.step import simulate_step
from elixir.step_trace import StepTrace
from elixir.units import parse_bytes

REGRET_BAR, NOMINAL_BAR = 0.05, 0.01
HOST_PARTS = (2, 4, 8)
"""Parts of the host's memory for which the slow machine is planned as well: less of it allows fewer states there."""

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


def request(it: Situation, host_memory: str | int, placement: str = "auto") -> SearchRequest:
    """The question to the planner."""
    return SearchRequest.of(
        it.ranks, host_memory=host_memory, device_memory=it.device_memory, placement=placement, clipping=True
    )


def slow_steps(it: Situation, step: StepTrace, slow: HardwareProfile) -> dict[str, float]:
    """Seconds on the slow machine, by plan that was made for it; those that do not fit are left out."""
    asked = {"planned for it": request(it, it.host_memory), "all on the device": request(it, it.host_memory, "cuda")}
    host_bytes = parse_bytes(it.host_memory)
    asked |= {f"1/{part} of the host": request(it, host_bytes // part) for part in HOST_PARTS}
    found = {}
    for name, each in asked.items():
        try:
            plan = plan_or_shortage(step, slow, each)
        except PlanError:
            continue
        fastest_s = plan.predicted.fastest_s
        found[name] = min(plan.predicted.step_s, plan.predicted.step_s if fastest_s is None else fastest_s)
    return found


def row_of(name: str) -> Row:
    """One situation."""
    it, began_s = CHOSEN[name], time.process_time()
    step, hardware = trace(it), it.hardware
    slow = Scenario(SLOW_HOST_ADAM).machine(hardware)
    plan = plan_from_trace(step, hardware, request(it, it.host_memory))
    return row(name, it, plan, simulate_step(plan, step, slow).step_s, slow_steps(it, step, slow), began_s)


def row(name: str, it: Situation, plan: Plan, slow_s: float, others: dict[str, float], began_s: float) -> Row:
    """One plan, against the others that are known."""
    known = {"chosen": slow_s} | others
    best = min(known, key=lambda each: known[each])
    numel = sum(chunk.numel for chunk in plan.chunks if chunk.trainable)
    hosted = sum(chunk.numel for chunk in plan.chunks if chunk.trainable and chunk.state_home == "host")
    nominal_s = plan.predicted.step_s
    return {
        "situation": name,
        "ranks": it.ranks,
        "states_on_host": round(hosted / numel, 3),
        "nominal_s": round(nominal_s, 4),
        "nominal_over_fastest": round(nominal_s / (plan.predicted.fastest_s or nominal_s), 5),
        "slow_s": round(slow_s, 4),
        "best_slow_s": round(known[best], 4),
        "best_plan": best,
        "regret_percent": round(100 * (slow_s / known[best] - 1), 2),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def main() -> int:
    """Plan, compare, record; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="situations that contain this text")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    before, rows = conditions(), []
    for name in (each for each in CHOSEN if args.only in each):
        rows.append(row_of(name))
        print(rows[-1], file=sys.stderr, flush=True)
    print_table(f"CPU Adam x {SLOW_HOST_ADAM:g}", list(rows[0]), [list(each.values()) for each in rows])
    if not args.no_record:
        print(append_rows("slow_host", [{**before, **each} for each in rows]))
    worst = max(each["regret_percent"] for each in rows)
    nominal = max(each["nominal_over_fastest"] for each in rows)
    print(f"regret: worst {worst:.2f} % (bar {100 * REGRET_BAR:g} %); chosen over fastest: worst {nominal:.4f}")
    return int(worst > 100 * REGRET_BAR or nominal > 1 + NOMINAL_BAR)


if __name__ == "__main__":
    raise SystemExit(main())
