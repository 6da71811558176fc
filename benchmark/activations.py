"""Steps on long sequences with chosen activations, simulated: over the best plan that recomputes whole layers.

    python benchmark/activations.py [--models llama-3-8b ...] [--tokens 16384 ...] [--hosts 200GiB ...] [--no-record]

One sequence in bfloat16 with fused kernels and AdamW. `best_s` is the fastest plan of `search_batches`, which chooses
how many layers run again in backward; `chosen_s` that of ``activations="auto"``, and `kept_s` the same without moving
activations to the host; `floor_s` is the compute of a step that recomputes nothing, whatever memory that takes. Where
nothing fits there are no seconds. Appends a row for each situation to ``results/activations.csv``, with the processor
seconds (medians of `ROUNDS`, in turns) of planning a model that recomputes all layers, and of choosing, each with its
traces. Fails if choosing finds
no plan, or one that is slower than the best.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.common import Row, append_rows, conditions, print_table
from elixir.errors import PlanError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.models import build
from elixir.models.activation_checkpointing import checkpointable_layers
from elixir.plan.activations import activations_text
from elixir.search import plan_from_trace, search_batches
from elixir.search.advise import activations
from elixir.search.advise.answer import Answer
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.searches import answer_to
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.step_trace import StepTrace

T = TypeVar("T")
ROUNDS = 3


class Situation(NamedTuple):
    """A step, and the machine for it."""

    model: str
    machine: str
    """Name of a preset."""
    tokens: int
    host_memory: str


SITUATIONS = (
    *(
        Situation("llama-3-8b", "h100", tokens, host)
        for tokens, host in itertools.product((16384, 32768, 65536, 131072), ("200GiB", "154GiB"))
    ),
    Situation("qwen2.5-32b", "rtx4090", 32768, "512GiB"),
)


def question(model: str, tokens: int, checkpoint: str) -> StepQuestion:
    """The step of one sequence."""
    built = build(model, dtype=torch.bfloat16, checkpoint=checkpoint, max_positions=tokens)
    return StepQuestion(model=built, seq=tokens, dtype="bf16", use_fused_kernels=True)


@cache
def traced(model: str, tokens: int, machine: str, checkpoint: str) -> StepTrace:
    """The trace of that step, which serves for all hosts."""
    return question(model, tokens, checkpoint).trace(preset(machine))


def floor_s(trace: StepTrace, hardware: HardwareProfile) -> float:
    """Seconds of its compute."""
    return float(Rates(hardware, main_dtype(trace), 1, 1).accesses_s(trace).sum())


def fitting(find: Callable[[], T]) -> T | None:
    """A plan; None where nothing fits."""
    try:
        return find()
    except PlanError:
        return None


def timed(find: Callable[[], T]) -> tuple[T | None, float]:
    """The budget that fits, and the processor seconds of finding it."""
    started = time.process_time()
    found = fitting(find)
    return found, time.process_time() - started


def row(it: Situation) -> Row:
    """One situation."""
    hardware = preset(it.machine)
    request = SearchRequest(world_size=1, optimizer_type="AdamW", host_budget=it.host_memory)
    auto = SearchRequest.of(request, activations="auto")

    def choose() -> Answer:
        return answer_to(question(it.model, it.tokens, "none"), hardware, auto, read_host=False)

    def plan() -> Answer:
        again = question(it.model, it.tokens, "non-reentrant").trace(hardware)
        return plan_from_trace(again, hardware, request)

    planning, choosing = [], []
    for _ in range(ROUNDS):
        every, seconds = timed(plan)
        planning.append(seconds)
        chosen, seconds = timed(choose)
        choosing.append(seconds)
    with patch.object(activations, "MOST_WAYS", 0):
        kept = fitting(choose)
    best = fitting(
        lambda: search_batches(
            lambda batch, form: traced(it.model, it.tokens, it.machine, form),
            hardware,
            request,
            samples=1,
            checkpoints=["none", "non-reentrant"],
            layers=len(checkpointable_layers(build(it.model))),
        )
    )
    best_s, chosen_s, kept_s = (None if each is None else each.plan.predicted.step_s for each in (best, chosen, kept))
    return {
        "model": it.model,
        "hardware": hardware.name,
        "tokens": it.tokens,
        "host_memory": it.host_memory,
        "all_again_s": None if every is None else round(every.plan.predicted.step_s, 4),
        "best_s": None if best_s is None else round(best_s, 4),
        "best_checkpoint": None if best is None else best.option.checkpoint,
        "kept_s": None if kept_s is None else round(kept_s, 4),
        "chosen_s": None if chosen_s is None else round(chosen_s, 4),
        "floor_s": round(floor_s(traced(it.model, it.tokens, it.machine, "none"), hardware), 4),
        "kept_ratio": None if kept_s is None or best_s is None else round(kept_s / best_s, 4),
        "ratio": None if chosen_s is None or best_s is None else round(chosen_s / best_s, 4),
        "kept": None if kept is None else activations_text(kept.plan.activations),
        "chosen": None if chosen is None else activations_text(chosen.plan.activations),
        "planning_s": round(statistics.median(planning), 3),
        "choosing_s": round(statistics.median(choosing), 3),
        **conditions(),
    }


def main() -> int:
    """All rows; 1 if a choice is slower than the best that recomputes whole layers, or none fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--hosts", nargs="+")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    rows = []
    for it in SITUATIONS:
        wanted = (args.models, it.model), (args.tokens, it.tokens), (args.hosts, it.host_memory)
        if all(only is None or value in only for only, value in wanted):
            if not rows:
                question(it.model, it.tokens, "non-reentrant").trace(preset(it.machine))  # what only a first trace does
            rows.append(row(it))
            print(rows[-1], flush=True)
    columns = ("model", "tokens", "host_memory", "best_s", "kept_s", "chosen_s", "floor_s", "kept_ratio", "ratio")
    print_table("seconds of a step, simulated", columns, [[each[name] for name in columns] for each in rows])
    if not args.no_record:
        append_rows("activations", rows)
    return int(any(each["chosen_s"] is None or float(each["ratio"] or 0) > 1 for each in rows))


if __name__ == "__main__":
    sys.exit(main())
