"""Whether more memory ever makes a step slower: every pair of budgets of eight steps, on paper.

    python benchmark/larger_budgets.py [--models NAME ...] [--every N] [--no-record]

Each step is planned with 12 budgets of a device times 3 of the host. Of two budgets of which one is nowhere smaller,
each plan of the smaller one fits the larger, so its fastest step must not take longer: pairs that do by more than
`SLOWER` are counted. Plans are for the rates of the presets alone. With `--every N` only each Nth device
budget is planned; the column `device_budgets` says how many were.

Appends a row for every model to ``results/larger_budgets.csv``; fails if a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions, print_table
from benchmark.situations import Situation, trace
from elixir.errors import PlanError
from elixir.search.planner import plan_or_shortage
from elixir.search.question import Question
from elixir.search.request import SearchRequest
from elixir.units import GIB

SLOWER = 1e-3

DEVICE_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Budgets of a device, over its memory."""
HOST_PER_DEVICE = (0.75, 1.5, 6.0)
"""Host memory for one rank, over the memory of its device."""

STEPS = {
    "GPT-2 XL, A10G": Situation("gpt2-xl", "a10g", 1, 4, 1024, ""),
    "OPT-1.3B, RTX 3090": Situation("opt-1.3b", "rtx3090", 1, 4, 1024, ""),
    "OPT-6.7B, A100-40": Situation("opt-6.7b", "a100-40gb", 1, 4, 1024, ""),
    "OPT-13B, H200": Situation("opt-13b", "h200", 1, 8, 1024, ""),
    "Llama-2-7B, H100": Situation("llama-2-7b", "h100", 1, 4, 2048, ""),
    "Llama-3-8B, 4 x L40S": Situation("llama-3-8b", "l40s", 4, 1, 2048, ""),
    "OPT-30B, 4 x A100": Situation("opt-30b", "a100", 4, 4, 2048, ""),
    "Mixtral-8x7B, 8 x A100": Situation("mixtral-8x7b", "a100", 8, 1, 2048, ""),
}


class Found(NamedTuple):
    """One plan: its budgets, and seconds of a step."""

    device_bytes: int
    host_bytes: int
    fastest_s: float
    chosen_s: float

    def is_within(self, other: Found) -> bool:
        """Whether each plan of this one's budgets fits those of the other, which are not the same."""
        mine, theirs = (self.device_bytes, self.host_bytes), (other.device_bytes, other.host_bytes)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def plans(it: Situation, every: int) -> list[Found]:
    """The plans of all budgets that have one."""
    step, hardware, found = trace(it), it.hardware, []
    for share, per_device in itertools.product(DEVICE_SHARES[every - 1 :: every], HOST_PER_DEVICE):
        device_bytes = int(share * hardware.device_memory_bytes)
        host_bytes = int(per_device * hardware.device_memory_bytes) * it.ranks
        asked = SearchRequest.of(it.ranks, device_memory=device_bytes, host_budget=host_bytes, assume="nominal")
        try:
            seconds = plan_or_shortage(Question(step, hardware, asked)).predicted
        except PlanError:
            continue
        found.append(Found(device_bytes, host_bytes, seconds.fastest_s or seconds.step_s, seconds.step_s))
    return found


def row(name: str, every: int) -> Row:
    """One step with all its budgets."""
    began_s = time.process_time()
    found = plans(STEPS[name], every)
    pairs = [(less, more) for less in found for more in found if less.is_within(more)]
    worst = max(pairs, key=lambda pair: pair[1].fastest_s / pair[0].fastest_s, default=None)
    where = (
        ""
        if worst is None
        else " -> ".join(f"{each.device_bytes / GIB:.1f} + {each.host_bytes / GIB:.0f} GiB" for each in worst)
    )
    return {
        "step": name,
        "device_budgets": len(DEVICE_SHARES[every - 1 :: every]),
        "plans": len(found),
        "pairs": len(pairs),
        "slower": sum(more.fastest_s > less.fastest_s * (1 + SLOWER) for less, more in pairs),
        "slowest_percent": 0.0 if worst is None else round(100 * (worst[1].fastest_s / worst[0].fastest_s - 1), 4),
        "slowest_pair": where,
        "chosen_over_fastest_percent": round(100 * max((e.chosen_s / e.fastest_s - 1 for e in found), default=0.0), 3),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def main() -> int:
    """Plans, compares, records; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--every", type=int, default=1, help="plan each Nth device budget only")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    before, rows = conditions(), []
    for name in args.models:
        rows.append(row(name, args.every))
        print(rows[-1], file=sys.stderr, flush=True)
    print_table("larger budgets", list(rows[0]), [list(each.values()) for each in rows])
    if not args.no_record:
        print(append_rows("larger_budgets", [{**before, **each} for each in rows]))
    slower, pairs = (sum(each[key] for each in rows) for key in ("slower", "pairs"))
    print(f"{slower} of {pairs} pairs are slower with more memory")
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())
