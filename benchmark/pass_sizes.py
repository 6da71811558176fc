"""How much passes of several micro-batches bring, and whether ``pass_size="auto"`` chooses them where they bring nothing.

    python benchmark/pass_sizes.py [--only NAME ...] [--no-record]

Each situation is a machine, a model and a number of tokens per rank and optimizer step, in bfloat16, with checkpointing,
fused kernels, clipping and AdamW. The tokens are split into micro-batches in several ways. Each split is planned twice
with ``assume="nominal"``: one micro-batch at a time, and with passes of the best size. Seconds are simulated at the rates
of the presets.

* ``smallest``: seconds of the smallest micro-batch that fits, one at a time, over those with passes;
* ``best``: seconds of the best split, one at a time, over those of the best split with passes: what passes bring to
  those who would try all splits;
* ``pass_size``: the size that the search chooses for the best split of one micro-batch at a time.

Appends to ``results/pass_sizes.csv``. Fails if a plan with ``auto`` is slower than one micro-batch at a time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import Row, append_rows, conditions, print_table
from elixir.errors import PlanError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.models.loading import build
from elixir.models.step import default_input, default_step
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step

SHORT, LONG = 2048, 32768
"""Tokens of a sequence."""
LARGEST_BATCH = 8
WITHOUT_PEERS = 6e9
"""Bytes per second between two cards that cannot read each other's memory, through the host's."""


class Situation(NamedTuple):
    """A machine, a model and a step."""

    model: str
    machine: str
    """Name of a preset."""
    ranks: int
    host_memory: str
    sequences: int
    """Per rank and optimizer step."""
    sequence: int = SHORT
    peer_bytes_per_s: float | None = None
    """The rate between devices; None: as the preset has it."""

    @property
    def hardware(self) -> HardwareProfile:
        """The preset, with as many devices in a machine."""
        found = replace(preset(self.machine), devices_per_host=self.ranks)
        rate = self.peer_bytes_per_s
        return found if rate is None else replace(found, device_to_device_bytes_per_s=rate)

    @property
    def splits(self) -> list[tuple[int, int]]:
        """Sequences of a micro-batch, and micro-batches of a step."""
        powers = [1 << power for power in range(LARGEST_BATCH.bit_length()) if self.sequence == SHORT or power == 0]
        return [(batch, self.sequences // batch) for batch in powers if not self.sequences % batch]


SITUATIONS = {
    "8B, 4090, 8k": Situation("llama-3.1-8b", "rtx4090", 1, "256GiB", 4),
    "8B, 4090, 32k": Situation("llama-3.1-8b", "rtx4090", 1, "256GiB", 16),
    "8B, 4090, 4 x 32k": Situation("llama-3.1-8b", "rtx4090", 1, "256GiB", 4, LONG),
    "32B, 4090, 8k": Situation("qwen2.5-32b", "rtx4090", 1, "512GiB", 4),
    "32B, 4090, 32k": Situation("qwen2.5-32b", "rtx4090", 1, "512GiB", 16),
    "30B-A3B, 4090, 131k": Situation("qwen3-30b-a3b", "rtx4090", 1, "512GiB", 64),
    "70B, 8 x H100, 8k": Situation("llama-3.1-70b", "h100", 8, "2TiB", 4),
    "70B, 8 x H100, 32k": Situation("llama-3.1-70b", "h100", 8, "2TiB", 16),
    "70B, 8 x H100, 4 x 32k": Situation("llama-3.1-70b", "h100", 8, "2TiB", 4, LONG),
    "70B, 8 x 4090, 8k": Situation("llama-3.1-70b", "rtx4090", 8, "2TiB", 4),
    "70B, 8 x 4090, 32k": Situation("llama-3.1-70b", "rtx4090", 8, "2TiB", 16),
    "70B, 8 x 4090 without peers, 8k": Situation("llama-3.1-70b", "rtx4090", 8, "2TiB", 4, SHORT, WITHOUT_PEERS),
    "70B, 8 x 4090 without peers, 32k": Situation("llama-3.1-70b", "rtx4090", 8, "2TiB", 16, SHORT, WITHOUT_PEERS),
    "8B, H100, 8k": Situation("llama-3.1-8b", "h100", 1, "256GiB", 4),
}


def traced(it: Situation, batch: int) -> StepTrace:
    """A micro-batch of one rank."""
    model = build(it.model, dtype=torch.bfloat16, checkpoint="non-reentrant")
    inp = default_input(model, batch=batch, seq=it.sequence)
    return trace_step(
        model,
        inp,
        default_step,
        dtype=torch.bfloat16,
        hardware=it.hardware,
        model_name=it.model,
        use_fused_kernels=True,
    )


def planned(it: Situation, step: StepTrace, accumulation: int, pass_size: int | Literal["auto"]) -> Plan | None:
    """The fastest plan; None where nothing fits."""
    try:
        return plan_from_trace(
            step,
            it.hardware,
            it.ranks,
            host_budget=it.host_memory,
            accumulation=accumulation,
            pass_size=pass_size,
            clipping=True,
            assume="nominal",
        ).plan
    except PlanError:
        return None


def row(name: str) -> Row:
    """One situation."""
    it = SITUATIONS[name]
    pairs: list[tuple[int, Plan, Plan]] = []
    for batch, accumulation in it.splits:
        step = traced(it, batch)
        one, several = (planned(it, step, accumulation, size) for size in (1, "auto"))
        if one is not None and several is not None:
            pairs.append((batch, one, several))
            print(f"{name}, {batch} x {accumulation}: {seconds(one):.2f} s, {seconds(several):.2f} s with passes of "
                  f"{several.pass_size}", flush=True)  # fmt: skip
    best = min(pairs, key=lambda pair: seconds(pair[1]))
    with_passes = min(pairs, key=lambda pair: seconds(pair[2]))
    return {
        "situation": name,
        "tokens": it.sequences * it.sequence,
        "split": f"{best[0]} x {best[1].accumulation}",
        "one_s": round(seconds(best[1]), 3),
        "pass_size": best[2].pass_size,
        "passes_split": f"{with_passes[0]} x {with_passes[2].accumulation}",
        "passes_size": with_passes[2].pass_size,
        "passes_s": round(seconds(with_passes[2]), 3),
        "best": round(seconds(best[1]) / seconds(with_passes[2]), 3),
        "smallest": round(seconds(pairs[0][1]) / seconds(pairs[0][2]), 3),
        "least": round(min(seconds(one) / seconds(several) for _, one, several in pairs), 4),
    }


def seconds(plan: Plan) -> float:
    """The simulated seconds of a step."""
    return plan.predicted.step_s


def main() -> int:
    """Plans, records, and holds the ratios to the bar; 1 where it is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SITUATIONS), default=list(SITUATIONS))
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    before = conditions()
    rows = []
    for name in args.only:
        rows.append(row(name))
        if not args.no_record:
            append_rows("pass_sizes", [{**before, **rows[-1]}])
    print_table("Passes of several micro-batches, simulated", list(rows[0]), [list(each.values()) for each in rows])
    slower = [each["situation"] for each in rows if each["least"] < 1]
    for name in slower:
        print(f"missed: {name} is slower with passes")
    return bool(slower)


if __name__ == "__main__":
    sys.exit(main())
