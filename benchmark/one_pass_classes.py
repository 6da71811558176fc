"""How many classes of transformers take several micro-batches in one pass, with the bits of plain accumulation.

    python benchmark/one_pass_classes.py [--only bert opt] [--tasks causal] [--resume] [--no-record]

The classes are those of `transformers_classes`, each with its own activation checkpointing on; those without any are left
out. Two steps of AdamW, each of three micro-batches with other numbers, of which one has padding where the class takes a
mask, run under a plan that streams the weights, and in plain PyTorch. A class is

* ``bits``: losses and weights are those of plain PyTorch;
* ``refused``: the plan, or its first step, raises an error that names the cause;
* ``wrong``: anything else;
* ``no reference``: plain PyTorch cannot checkpoint it, or differs from itself.

Each class runs in a process that is forked for it. Appends to ``results/one_pass_classes.csv``; fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import collections
import copy
import csv
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from torch import nn

from benchmark.common import RESULTS, Row, append_rows, conditions
from benchmark.transformers_classes import PEFT, TASKS, apart, build, listed, new_batch, prepare
from elixir.errors import ElixirError
from elixir.search.planner import simple_plan
from elixir.search.request import SearchRequest
from elixir.search.searches import profile_for
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer

STEPS, COUNT = 2, 3
LEAST_WITH_BITS = 0.85
COLUMNS = ("class", "task", "outcome", "layers", "why", "cpu_s")
Outcome = tuple[list[float], dict[str, torch.Tensor]]
Batch = dict[str, Any]


def step_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a micro-batch, a part of the step's, with the random numbers of its seed."""
    given = dict(batch)
    torch.manual_seed(given.pop("seed"))
    loss: torch.Tensor = model(**given).loss / COUNT
    return loss


def traced(model: nn.Module, batch: Batch) -> None:
    """Forward and backward of a micro-batch."""
    step_fn(model, batch).backward()


def micro_batches(model: nn.Module, task: str, inp: Batch) -> list[list[Batch]]:
    """The micro-batches of each step; the second of a step has padding if the class takes a mask."""
    masked = "input_ids" in inp and _takes_mask(model, inp)
    steps = []
    for first in range(0, STEPS * COUNT, COUNT):
        made = [new_batch(model, task) | {"seed": first + index} for index in range(COUNT)]
        if masked:
            made[1]["attention_mask"] = _mask(inp)
        steps.append(made)
    steps[0][0] = inp | {"seed": 0}
    return steps


def _mask(inp: Batch) -> torch.Tensor:
    mask = torch.ones_like(inp["input_ids"])
    mask[0, -3:] = 0
    return mask


def _takes_mask(model: nn.Module, inp: Batch) -> bool:
    try:
        loss = copy.deepcopy(model)(**inp, attention_mask=_mask(inp)).loss
    except Exception:
        return False
    return bool(torch.isfinite(loss))


def plainly(model: nn.Module, steps: list[list[Batch]]) -> Outcome:
    """Accumulation in plain PyTorch."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in steps:
        for batch in step:
            loss = step_fn(model, batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def in_passes(model: nn.Module, steps: list[list[Batch]]) -> tuple[Outcome, int]:
    """The same in one pass per step, under a plan that streams most weights; and the number of layers."""
    profile = profile_for("cpu")
    trace = trace_step(model, steps[0][0], traced, hardware=profile)
    request = SearchRequest(world_size=1, optimizer_type="AdamW", accumulation=COUNT, pass_size=COUNT)
    plan = simple_plan(trace, profile, request, split_number=6, allocate_factor=0.6, shard_device="cpu")
    module, losses = ElixirModule(model, plan, device="cpu"), []
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def run(module: nn.Module, batch: Batch) -> float:
        loss = step_fn(module, batch)
        optimizer.backward(loss)
        return loss.item()

    for step in steps:
        losses += optimizer.accumulate(run, step)
        optimizer.step()
        optimizer.zero_grad()
    state = module.state_dict()
    module.close()
    return (losses, state), len(plan.step.checkpointed)


def difference(found: Outcome, expected: Outcome) -> str:
    """Says where two outcomes differ; empty if they have the same bits."""
    if found[0] != expected[0]:
        return f"losses {found[0]} instead of {expected[0]}"
    names = [name for name, value in expected[1].items() if not torch.equal(value, found[1][name])]
    return f"{len(names)} of {len(expected[1])} weights, such as {names[0]}" if names else ""


def judge(task: str, kind: str, name: str) -> Row:
    """One row."""
    try:
        model, inp = build(task, kind, name)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            return {"outcome": "no reference", "why": "no module checkpoints"}
        steps = micro_batches(model, task, inp)
        expected = plainly(copy.deepcopy(model), steps)
    except Exception as error:
        return {"outcome": "no reference", "why": _first_line(error)}
    if difference(plainly(copy.deepcopy(model), steps), expected):
        return {"outcome": "no reference", "why": "plain PyTorch differs from itself"}
    try:
        found, layers = in_passes(model, steps)
    except ElixirError as error:
        return {"outcome": "refused", "why": _first_line(error)}
    except Exception as error:
        return {"outcome": "wrong", "why": _first_line(error)}
    differs = difference(found, expected)
    return {"outcome": "wrong" if differs else "bits", "layers": layers, "why": differs}


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).split("\n")[0]
    return text if isinstance(error, ElixirError) else f"{type(error).__name__}: {text[:300]}"


def done(path: Path) -> set[str]:
    """Classes that have a row by this version of transformers."""
    if not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        return {row["class"] for row in csv.DictReader(file) if row["transformers"] == transformers.__version__}


def main() -> int:
    """Runs, records, and compares with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="model types")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, PEFT], choices=[*TASKS, PEFT])
    parser.add_argument("--resume", action="store_true", help="leave out classes that have a row")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    prepare()
    seen: collections.Counter[str] = collections.Counter()
    left_out = done(RESULTS / "one_pass_classes.csv") if args.resume else set()
    started = time.monotonic()
    for task, kind, name in listed():
        if name in left_out or task not in args.tasks or not (args.only is None or kind in args.only):
            continue
        row = dict.fromkeys(COLUMNS) | {"class": name, "task": task, **conditions()} | apart(judge, task, kind, name)
        row["transformers"] = transformers.__version__
        if "error" in row:
            row |= {"outcome": "wrong", "why": row.pop("error")}
        seen[row["outcome"]] += 1
        print(f"{time.monotonic() - started:6.0f} s {name}: {row['outcome']} {row['why'] or ''}", flush=True)
        if not args.no_record:
            append_rows("one_pass_classes", [row])
    counted = sum(seen.values()) - seen["no reference"]
    print(dict(seen), f"with bits: {seen['bits'] / max(counted, 1):.1%} of {counted}")
    return int(bool(seen["wrong"]) or seen["bits"] < LEAST_WITH_BITS * counted)


if __name__ == "__main__":
    sys.exit(main())
