"""The time that an `ElixirTrainer` adds to a step, over the calls that a bare loop makes.

    python benchmark/integration_overhead.py [--steps 40] [--layers 12] [--hidden 768] [--no-record]

OPT-125m in float32 on the CPU, one sequence of 64 tokens. A step of a Trainer lasts from its callback `on_step_begin` to
`on_step_end`. A bare loop calls forward, backward, clipping, `step` and `zero_grad`; these calls are timed inside of the
Trainer's steps, and what remains is what a Trainer adds. So the step itself, which takes a thousand times as long, does
not blur it. The same is done with a plain Trainer over plain PyTorch, which counts parameters and walks over all modules
in every step: the integration answers for the difference. ``cpu`` is in CPU seconds of the thread, which other processes
disturb less.

Appends to ``results/integration_overhead.csv``; fails where the bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import OPTForCausalLM, Trainer, TrainerCallback

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmark.common import append_rows, conditions, percentiles  # noqa: E402
from elixir.integrations.transformers import ElixirTrainer, ElixirTrainingArguments  # noqa: E402
from elixir.models.loading import build  # noqa: E402
from elixir.models.model_shape import ModelShape, describe  # noqa: E402
from elixir.wrapper import ElixirModule, ElixirOptimizer  # noqa: E402

TOKENS = 64
WARM_UP_STEPS = 5
BAR_MS = 1.0
"""Most that the integration may add to a step."""
OURS = {ElixirModule: ("forward", "clip_grad_norm_", "zero_grad"), ElixirOptimizer: ("backward", "step", "zero_grad")}
PLAIN: dict[Any, tuple[str, ...]] = {
    OPTForCausalLM: ("forward",),
    torch.Tensor: ("backward",),
    torch.nn.utils: ("clip_grad_norm_",),
    torch.optim.AdamW: ("step",),
    torch.nn.Module: ("zero_grad",),
}
"""The calls of a bare loop, under a plan and without."""


def now() -> tuple[float, float]:
    """Seconds of the clock, and of this thread on a core."""
    return time.perf_counter(), time.thread_time()


class Steps(TrainerCallback):  # type: ignore[misc]
    """Remembers of each step how long it was outside of a bare loop's calls, in milliseconds of `now`."""

    def __init__(self) -> None:
        self.outside_ms: list[tuple[float, float]] = []
        self._start, self._inside, self._depth = now(), (0.0, 0.0), 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start, self._inside = now(), (0.0, 0.0)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        wall_s, cpu_s = (
            end - start - inside for end, start, inside in zip(now(), self._start, self._inside, strict=True)
        )
        self.outside_ms.append((1e3 * wall_s, 1e3 * cpu_s))

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose time counts as inside; within another such call it is counted already."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = now()
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._inside = tuple(  # type: ignore[assignment]
                        inside + end - begun for inside, end, begun in zip(self._inside, now(), start, strict=True)
                    )

        return run

    @contextlib.contextmanager
    def watching(self, calls: Mapping[Any, tuple[str, ...]]) -> Iterator[None]:
        """Times `calls`."""
        with contextlib.ExitStack() as changed:
            for owner, names in calls.items():
                for name in names:
                    changed.enter_context(patch.object(owner, name, self.timed(getattr(owner, name))))
            yield


def outside(
    kind: type, calls: Mapping[Any, tuple[str, ...]], shape: ModelShape, steps: int
) -> list[tuple[float, float]]:
    """Milliseconds of `now` that each step of a Trainer spends outside of `calls`."""
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (TOKENS,))
    watch = Steps()
    with tempfile.TemporaryDirectory() as folder, watch.watching(calls):
        given = ElixirTrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=1, max_steps=WARM_UP_STEPS + steps, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_strategy="no", elixir={"replan": False},
        )  # fmt: skip
        data = [{"input_ids": ids, "labels": ids}] * given.max_steps
        trainer = kind(build(shape, device="cpu"), given, train_dataset=data, callbacks=[watch])
        trainer.train()
        if kind is ElixirTrainer:
            trainer.elixir.module.close()
    return watch.outside_ms[WARM_UP_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="less for a quick look; rows are of 768")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    shape = describe("opt-125m").changed(layers=args.layers, hidden=args.hidden, ffn=4 * args.hidden)
    plain = outside(Trainer, PLAIN, shape, args.steps)
    ours = outside(ElixirTrainer, OURS, shape, args.steps)
    own_ms, own_cpu_ms = (statistics.median(step[which] for step in plain) for which in (0, 1))
    p20, p50, p80 = (each - own_ms for each in percentiles([wall_ms for wall_ms, _ in ours]))
    cpu_ms = statistics.median(cpu_ms for _, cpu_ms in ours) - own_cpu_ms
    row = {
        **conditions(), "model": "opt-125m", "layers": args.layers, "hidden": args.hidden, "steps": args.steps,
        "p20_ms": round(p20, 3), "p50_ms": round(p50, 3), "p80_ms": round(p80, 3), "cpu_ms": round(cpu_ms, 3),
        "trainer_ms": round(own_ms, 3), "trainer_cpu_ms": round(own_cpu_ms, 3),
    }  # fmt: skip
    print(
        f"the integration adds {p50:.2f} ms to a step ({p20:.2f} to {p80:.2f}), {cpu_ms:.2f} ms of CPU; "
        f"Trainer by itself {own_ms:.2f} ms, {own_cpu_ms:.2f} ms of CPU"
    )
    if not args.no_record:
        append_rows("integration_overhead", [row])
    if p50 > BAR_MS:
        raise SystemExit(f"more than {BAR_MS} ms")


if __name__ == "__main__":
    main()
