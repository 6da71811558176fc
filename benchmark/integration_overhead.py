"""The time that transformers' Trainer adds to a step under a plan, compared with a bare loop over the same model.

    python benchmark/integration_overhead.py [--rounds 9] [--steps 5] [--layers 12] [--no-record]

OPT-125m in float32 on the CPU, one sequence of 64 tokens. An `ElixirTrainer` and a bare loop take turns on one wrapped
model, round after round. A step of the Trainer lasts from its callback `on_step_begin` to `on_step_end`: forward,
backward, clipping, the optimizer, the schedule and clearing. The overhead is the median over rounds of the difference
of medians in a round. Steps are long and the overhead is small, so this wants a quiet machine; ``cpu_ms`` is the same
difference in CPU seconds of the process, which other processes disturb less.

Appends to ``results/integration_overhead.csv``; fails where the bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmark.common import append_rows, conditions, percentiles  # noqa: E402
from elixir.integrations.transformers import ElixirTrainer, ElixirTrainingArguments  # noqa: E402
from elixir.models import build_shape, describe  # noqa: E402

TOKENS = 64
BAR_MS = 1.0
"""Most that Trainer may add to a step."""

Seconds = tuple[float, float]
"""Seconds of the clock, and of the process."""


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(start: Seconds) -> Seconds:
    clock_s, process_s = now()
    return clock_s - start[0], process_s - start[1]


class Steps(TrainerCallback):  # type: ignore[misc]
    """Remembers how long each step took."""

    def __init__(self) -> None:
        self.seconds: list[Seconds] = []
        self.start = now()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(since(self.start))


def bare(trainer: Any, batch: dict[str, torch.Tensor], steps: int) -> list[Seconds]:
    module, optimizer = trainer.elixir.module, trainer.elixir.optimizers[0]
    found = []
    for _ in range(steps):
        start = now()
        optimizer.backward(module(**batch).loss)
        module.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(since(start))
    return found


def difference_ms(ours: list[Seconds], plain: list[Seconds], which: int) -> float:
    one, other = (statistics.median(seconds[which] for seconds in found) for found in (ours, plain))
    return 1e3 * (one - other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = build_shape(dataclasses.replace(describe("opt-125m"), layers=args.layers))
    ids = torch.randint(0, 1000, (TOKENS,))
    data = [{"input_ids": ids, "labels": ids}] * args.steps
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        given = ElixirTrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=1, max_steps=args.steps, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_strategy="no", elixir={"replan": False},
        )  # fmt: skip
        trainer = ElixirTrainer(model, given, train_dataset=data, callbacks=[steps])
        batch = {"input_ids": ids[None], "labels": ids[None]}
        trainer.train()  # moments are made
        rounds = []
        for _ in range(args.rounds):
            steps.seconds.clear()
            trainer.train()
            plain = bare(trainer, batch, args.steps)
            # The first step of a turn brings the caches of a processor back.
            rounds.append([difference_ms(steps.seconds[1:], plain[1:], which) for which in (0, 1)])
        trainer.elixir.module.close()
    p20, p50, p80 = percentiles([clock_ms for clock_ms, _ in rounds])
    cpu_ms = statistics.median(process_ms for _, process_ms in rounds)
    row = {
        **conditions(), "model": "opt-125m", "layers": args.layers, "rounds": args.rounds, "p20_ms": round(p20, 3),
        "p50_ms": round(p50, 3), "p80_ms": round(p80, 3), "cpu_ms": round(cpu_ms, 3),
    }  # fmt: skip
    print(f"Trainer adds {p50:.2f} ms to a step ({p20:.2f} to {p80:.2f}), {cpu_ms:.2f} ms of CPU")
    if not args.no_record:
        append_rows("integration_overhead", [row])
    if p50 > BAR_MS:
        raise SystemExit(f"more than {BAR_MS} ms")


if __name__ == "__main__":
    main()
