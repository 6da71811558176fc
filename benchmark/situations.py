"""How much shorter a step with clipping becomes by new states that the host makes during backward, in ten situations.

    python benchmark/situations.py [--only NAME ...] [--no-record]

Each is a machine, a model and a batch that somebody trains, with checkpointing, in bfloat16 and with AdamW. One plan
has ``early_updates=False`` and updates after the norm; the other one leaves the choice to the search. Both have the same
budgets: a second set of states comes out of the host memory that is given, after copies for a checkpoint. Seconds are
simulated at the rates of the presets. The share is of the elements whose states the host has.

Appends to ``results/situations.csv``; fails if the median of the ratios is above `BARS`, or any ratio above 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import Row, append_rows, conditions, print_table
from elixir.hardware.profile import HardwareProfile, preset
from elixir.models.loading import build
from elixir.models.step import default_input, default_step
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step

BARS = {"median": 0.85, "worst": 1.0}


class Situation(NamedTuple):
    """A machine and a step."""

    model: str
    machine: str
    """Name of a preset."""
    ranks: int
    batch: int
    sequence: int
    host_memory: str
    device_memory: str | None = None
    """None: what the device has, less a reserve."""
    per_host: int | None = None
    """Ranks of one machine; None: all of them."""

    @property
    def hardware(self) -> HardwareProfile:
        """The preset, with as many devices in each machine."""
        return replace(preset(self.machine), devices_per_host=self.per_host or self.ranks)


SITUATIONS = {
    "Llama-3-8B, 4090": Situation("llama-3-8b", "rtx4090", 1, 2, 2048, "128GiB"),
    "Llama-2-13B, A100": Situation("llama-2-13b", "a100", 1, 4, 2048, "128GiB"),
    "Llama-3-70B, 8 x H100": Situation("llama-3-70b", "h100", 8, 2, 4096, "1TiB"),
    "Llama-3-70B, 8 x H100, 2 TB": Situation("llama-3-70b", "h100", 8, 2, 4096, "2TiB"),
    "OPT-30B, 4 x A100-40": Situation("opt-30b", "a100-40gb", 4, 4, 2048, "512GiB"),
    "Mixtral-8x7B, 8 x A100": Situation("mixtral-8x7b", "a100", 8, 2, 4096, "1TiB"),
    "Llama-3-8B, 8 x 4090": Situation("llama-3-8b", "rtx4090", 8, 1, 2048, "256GiB"),
    "OPT-13B, H200": Situation("opt-13b", "h200", 1, 8, 1024, "128GiB"),
    "GPT-2 XL, 3090 with 12 GiB": Situation("gpt2-xl", "rtx3090", 1, 4, 1024, "32GiB", "12GiB"),
    "Llama-3-70B, H200": Situation("llama-3-70b", "h200", 1, 4, 4096, "1.5TiB"),
}


def trace(it: Situation) -> StepTrace:
    """One step of one rank."""
    model = build(it.model, dtype=torch.bfloat16, checkpoint="non-reentrant")
    inp = default_input(model, batch=it.batch, seq=it.sequence)
    return trace_step(model, inp, default_step, dtype=torch.bfloat16, hardware=it.hardware, model_name=it.model)


def planned(it: Situation, step: StepTrace, *, early_updates: bool | None) -> Plan:
    """The fastest plan, with clipping."""
    return plan_from_trace(
        step,
        it.hardware,
        it.ranks,
        host_budget=it.host_memory,
        device_memory=it.device_memory,
        early_updates=early_updates,
        clipping=True,
        assume="nominal",
    ).plan


def row(name: str) -> Row:
    """One situation."""
    it = SITUATIONS[name]
    step = trace(it)
    today, plan = (planned(it, step, early_updates=early_updates) for early_updates in (False, None))
    on_host = [chunk for chunk in plan.chunks if chunk.trainable and chunk.state_home == "host"]
    numel = sum(chunk.numel for chunk in on_host)
    early = sum(chunk.numel for chunk in on_host if chunk.home.early)
    before_s, after_s = today.predicted.seconds["total"], plan.predicted.seconds["total"]
    return {
        "situation": name,
        "today_s": round(before_s, 4),
        "speculating_s": round(after_s, 4),
        "ratio": round(after_s / before_s, 4),
        "share": round(early / numel, 3) if numel else 0.0,
        "new_states_bytes": plan.predicted.host_parts.get("new_states", 0),
        "host_peak_bytes": plan.predicted.host_peak_bytes,
        "host_budget_bytes": plan.host_budget_bytes,
        "hardware_fingerprint": plan.hardware_fingerprint,
    }


def main() -> int:
    """Plans, records, and holds the ratios to the bars; 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SITUATIONS), default=list(SITUATIONS))
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    before, rows = conditions(), []
    for name in args.only:
        rows.append(row(name))
        print(rows[-1], flush=True)
    columns = [key for key in rows[0] if key != "hardware_fingerprint"]
    print_table("Steps with clipping, simulated", columns, [[each[key] for key in columns] for each in rows])
    ratios = [each["ratio"] for each in rows]
    found = {"median": statistics.median(ratios), "worst": max(ratios)}
    print(found)
    if not args.no_record:
        print(append_rows("situations", [{**before, **each} for each in rows]))
    missed = [name for name, bar in BARS.items() if found[name] > bar]
    for name in missed:
        print(f"missed: {name} {found[name]:.3f}, bar {BARS[name]}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
