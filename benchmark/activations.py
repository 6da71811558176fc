"""Steps on long sequences with chosen activations, simulated: over the best plan that recomputes whole layers.

    python benchmark/activations.py [--tokens 16384 ...] [--hosts 200GiB 154GiB] [--no-record]

Llama-3-8B in bfloat16 with fused kernels, one sequence, AdamW, one H100. `best_s` is the fastest plan of
`search_batches`, which chooses how many layers run again in backward; `chosen_s` that of ``activations="auto"``, and
`kept_s` the same without moving activations to the host; `floor_s` is the compute of a step that recomputes nothing, whatever memory that takes. Appends a row for each length
and host to ``results/activations.csv``, with the processor seconds of planning a model that recomputes all layers, and
of choosing. Fails if choosing is ever slower than the best.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions, print_table
from elixir.hardware.profile import HardwareProfile, preset
from elixir.models import build
from elixir.models.activation_checkpointing import checkpointable_layers
from elixir.plan.activations import activations_text
from elixir.search import plan_from_trace, search_batches
from elixir.search.advise import activations
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.searches import answer_to
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.step_trace import StepTrace

MODEL, TOKENS, HOSTS = "llama-3-8b", (16384, 32768, 65536, 131072), ("200GiB", "154GiB")


def question(tokens: int, checkpoint: str) -> StepQuestion:
    """The step of one sequence."""
    model = build(MODEL, dtype=torch.bfloat16, checkpoint=checkpoint, max_positions=tokens)
    return StepQuestion(model=model, seq=tokens, dtype="bf16", use_fused_kernels=True)


@cache
def traced(tokens: int, checkpoint: str) -> StepTrace:
    """The trace of that step, which serves for all hosts."""
    return question(tokens, checkpoint).trace(preset("h100"))


def floor_s(trace: StepTrace, hardware: HardwareProfile) -> float:
    """Seconds of its compute."""
    return float(Rates(hardware, main_dtype(trace), 1, 1).accesses_s(trace).sum())


def row(tokens: int, host: str) -> Row:
    """One length on one machine."""
    hardware = preset("h100")
    request = SearchRequest(world_size=1, optimizer_type="AdamW", host_memory=host)
    started = time.process_time()
    every = plan_from_trace(question(tokens, "non-reentrant").trace(hardware), hardware, request)
    between = time.process_time()
    chosen = answer_to(
        question(tokens, "none"), hardware, SearchRequest.of(request, activations="auto"), read_host=False
    )
    ended = time.process_time()
    with patch.object(activations, "MOST_WAYS", 0):
        kept = answer_to(
            question(tokens, "none"), hardware, SearchRequest.of(request, activations="auto"), read_host=False
        )
    layers = len(checkpointable_layers(build(MODEL)))
    best = search_batches(
        lambda batch, form: traced(tokens, form),
        hardware,
        request,
        samples=1,
        checkpoints=["none", "non-reentrant"],
        layers=layers,
    )
    best_s, chosen_s = best.plan.predicted.step_s, chosen.plan.predicted.step_s
    return {
        "model": MODEL,
        "hardware": hardware.name,
        "tokens": tokens,
        "host_memory": host,
        "all_again_s": round(every.plan.predicted.step_s, 4),
        "best_s": round(best_s, 4),
        "best_checkpoint": best.option.checkpoint,
        "kept_s": round(kept.plan.predicted.step_s, 4),
        "chosen_s": round(chosen_s, 4),
        "floor_s": round(floor_s(traced(tokens, "none"), hardware), 4),
        "kept_ratio": round(kept.plan.predicted.step_s / best_s, 4),
        "ratio": round(chosen_s / best_s, 4),
        "kept": activations_text(kept.plan.activations),
        "chosen": activations_text(chosen.plan.activations),
        "planning_s": round(between - started, 3),
        "choosing_s": round(ended - between, 3),
        **conditions(),
    }


def main() -> int:
    """All rows; 1 if a choice is slower than the best that recomputes whole layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--hosts", nargs="+", default=HOSTS)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens:
        for host in args.hosts:
            rows.append(row(tokens, host))
            print(rows[-1], flush=True)
    columns = ("tokens", "host_memory", "all_again_s", "best_s", "kept_s", "chosen_s", "floor_s", "kept_ratio", "ratio")
    print_table("seconds of a step, simulated", columns, [[each[name] for name in columns] for each in rows])
    if not args.no_record:
        append_rows("activations", rows)
    return int(any(float(str(each["ratio"])) > 1 for each in rows))


if __name__ == "__main__":
    sys.exit(main())
