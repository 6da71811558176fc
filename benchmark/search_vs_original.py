"""Our search against the first Elixir's rule: simulated seconds, bytes moved, and how long each takes to decide.

    python benchmark/search_vs_original.py [--models opt-13b opt-175b] [--dry]

Every case is one model, device budget and world size, on the H200 preset with host memory enough for any plan. Rows are
appended to `results/search_vs_original.csv`. Fails if any step of ours takes longer than the rule's would at the same
device budget, both simulated; but for plans that keep everything on the device, which go first.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import Row, append_rows, conditions, percentiles
from benchmark.original_rule import OriginalRule
from elixir.errors import PlanError
from elixir.hardware.profile import preset
from elixir.models.loading import build
from elixir.models.step import default_input, default_step
from elixir.optimizer_states import StateSize
from elixir.search import plan_from_trace
from elixir.search.planner import PREFETCH_DEPTH
from elixir.search.problem.placement import Setting
from elixir.search.propose.sizes import SearchSpace
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step

MODELS = (
    *("opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "opt-175b"),
    *("gpt2-4b", "gpt2-10b", "gpt2-15b", "gpt2-20b"),
)
BUDGETS_GIB = (24, 40, 80, 140)
WORLD_SIZES = (1, 2, 4, 8)
HOST_MEMORY = "16TiB"
BATCH, SEQUENCE = 8, 1024


def trace(name: str, checkpoint: str = "non-reentrant") -> StepTrace:
    """One step with checkpointing in bf16."""
    model = build(name, dtype=torch.bfloat16, checkpoint=checkpoint)
    batch = default_input(model, batch=BATCH, seq=SEQUENCE)
    hardware = preset("h200")
    return trace_step(model, batch, default_step, dtype=torch.bfloat16, hardware=hardware, model_name=name)


def rows(name: str) -> list[Row]:
    """All cases of one model."""
    hardware, step = preset("h200"), trace(name)
    found: list[Row] = []
    for world in WORLD_SIZES:
        started = time.perf_counter()
        setting = Setting(world, hardware.ranks_per_host(world), StateSize(8), True)
        rule, space = OriginalRule(step, setting), SearchSpace(step, hardware, setting)
        prepared_s = time.perf_counter() - started
        for gib in BUDGETS_GIB:
            started = time.perf_counter()
            original = rule.choose(gib * 2**30)
            original_s = prepared_s + time.perf_counter() - started
            careful = rule.choose(gib * 2**30, margins=True)
            started = time.perf_counter()
            try:
                plan = plan_from_trace(
                    step,
                    hardware,
                    world,
                    device_memory=gib * 2**30,
                    host_budget=HOST_MEMORY,
                    optimizer_type="Adam",
                    early_updates=False,  # homes are compared, under the same rules
                ).plan
            except PlanError as error:
                print(f"{name:10} {gib:4} GiB x {world}: {str(error).splitlines()[0]}")
                if original is not None:
                    raise
                continue
            ours_s = time.perf_counter() - started
            moved = plan.predicted.moved_bytes
            ours = moved["host_to_device"] + moved["device_to_host"]
            theirs = original.link_bytes if original else None
            their_step_s = original.candidate(space, PREFETCH_DEPTH).seconds["total"] if original else None
            ratio = None if theirs is None else 1.0 if theirs == ours == 0 else ours / max(theirs, 1)
            found.append(
                {
                    **conditions(),
                    "hardware": hardware.name,
                    "model": name,
                    "batch": BATCH,
                    "seq": SEQUENCE,
                    "device_gib": gib,
                    "world_size": world,
                    "our_link_bytes": ours,
                    "original_link_bytes": theirs,
                    "original_with_margins_link_bytes": careful.link_bytes if careful else None,
                    "ours_over_original": None if ratio is None else round(ratio, 4),
                    "our_step_s": round(plan.predicted.seconds["total"], 6),
                    "original_step_s": round(their_step_s, 6) if their_step_s else None,
                    "faster": round(their_step_s / plan.predicted.seconds["total"], 4) if their_step_s else None,
                    "our_chunk_bytes": plan.block_bytes or max(chunk.weight_bytes for chunk in plan.chunks),
                    "our_blocks": plan.block_count,
                    "our_device_states": sum(chunk.state_home == "device" for chunk in plan.chunks),
                    "our_chunks": len(plan.chunks),
                    "original_chunk_bytes": original.chunk_bytes if original else None,
                    "original_blocks": original.blocks if original else None,
                    "original_device_chunks": original.device_chunks if original else None,
                    "original_chunks": original.chunks if original else None,
                    "our_search_s": round(ours_s, 4),
                    "original_search_s": round(original_s, 4),
                }
            )
            text = "the original finds no plan"
            if ratio is not None and their_step_s is not None:
                faster = their_step_s / plan.predicted.seconds["total"]
                text = f"{faster:.3f} times as fast as the original's, {ratio:.3f} of its bytes"
            print(f"{name:10} {gib:4} GiB x {world}: {ours / 2**30:8.2f} GiB a step, {text}; found in {ours_s:.2f} s")
    return found


def main() -> int:
    """Runs, appends, summarises; 1 if any case is slower than the original's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--dry", action="store_true", help="append nothing")
    arguments = parser.parse_args()
    table = [row for name in arguments.models for row in rows(name)]
    if not arguments.dry:
        append_rows("search_vs_original", table)
    compared = [row for row in table if row["ours_over_original"] is not None]
    worse = [row for row in compared if row["our_blocks"] and row["our_step_s"] > row["original_step_s"]]
    more = [row for row in compared if row["our_link_bytes"] > row["original_link_bytes"]]
    for label, key in (
        ("steps, how many times as fast as the original's", "faster"),
        ("bytes, ours over the original's", "ours_over_original"),
        ("our search, s", "our_search_s"),
        ("its search, s", "original_search_s"),
    ):
        values = [float(row[key]) for row in compared]
        p20, p50, p80 = percentiles(values)
        print(f"{label}: p20 {p20:.3f}  p50 {p50:.3f}  p80 {p80:.3f}  max {max(values):.3f}")
    for name in arguments.models:
        print(f"slowest search, {name}: {max(row['our_search_s'] for row in table if row['model'] == name):.2f} s")
    print(
        f"{len(compared)} cases compared, {len(table) - len(compared)} where only ours finds a plan, {len(worse)} "
        "slower, "
        f"{len(more)} that move more"
    )
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
