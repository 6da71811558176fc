"""Predicted peaks of host and device memory, compared with the growth of resident memory.

    python benchmark/host_peak.py [--worlds 1 2] [--steps 3] [--no-record]

On the CPU backend both homes are memory of the process, so what is compared is the sum: the plan's host peak (of the
whole machine) and its device peak (of every rank), against the growth of the ranks' resident memory, as Linux counts
it, from before the model is wrapped to the end of some training steps. The model is on meta before that, and few tokens
make the host the larger part where most is streamed. ``sum_error`` is compared with the bar; ``host_error`` puts the
whole difference down to the host, which is harsher, and says little where the device has most. A model of 120 M
parameters, float32, AdamW; three mixes of homes (`emulated_runs.homes`).

Not in any plan: with several ranks gloo copies the whole chunk for as long as a gather or a reduction lasts (24 MiB
here).

The C library maps large tensors one by one here, so that what is freed is no longer resident. Code of libraries becomes
resident by its first use, so a small model trains before anything is counted. Appends to ``results/host_peak.csv``;
fails where the error of a sum is above 5 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmark.common import append_rows, conditions, print_table
from benchmark.emulated_runs import MIXES, mixed_plans, run_apart
from elixir.hardware.profile import preset
from elixir.models.loading import build
from elixir.models.model_shape import ModelShape, describe
from elixir.models.step import default_input, default_step
from elixir.plan.plan import Plan
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.peaks import resident_growth

BAR = 0.05
BATCH, SEQUENCE = 1, 128
SHAPE = describe("opt-125m").changed(name="opt 16x768", layers=16, vocabulary=8192)
SMALL = SHAPE.changed(name="opt 2x256", layers=2, hidden=256, heads=4, ffn=1024)
MAPPED_FROM_BYTES = 1 << 16
"""Tensors from this size on are mapped one by one."""


def plan_of(shape: ModelShape, mix: str, world_size: int) -> Plan:
    """The plan of a mix, from a trace on meta."""
    hardware = preset("cpu")
    model = build(shape, dtype=torch.float32)
    inp = default_input(model, batch=BATCH, seq=SEQUENCE)
    trace = trace_step(model, inp, default_step, hardware=hardware, optimizer=None)
    return mixed_plans(trace, hardware, (mix,), world_size)[0]


def train(shape: ModelShape, plan: Plan, steps: int) -> None:
    """Some steps, from a model on meta."""
    model = build(shape, dtype=torch.float32)
    inp = default_input(model, batch=BATCH, seq=SEQUENCE)
    module = ElixirModule(model, plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True))
    for _ in range(steps):
        optimizer.backward(module(**inp).loss)
        optimizer.step()
        optimizer.zero_grad()
    module.settle()
    module.close()


def grown_bytes(mix: str, world_size: int, steps: int) -> tuple[int, Plan]:
    """The largest growth of this process, and the plan it ran."""
    plan = plan_of(SHAPE, mix, world_size)
    train(SMALL, plan_of(SMALL, mix, world_size), steps)
    with resident_growth() as growth:
        train(SHAPE, plan, steps)
    return growth.peak_bytes, plan


def rank(index: int, folder: str, mix: str, world_size: int, steps: int) -> None:
    """One of several ranks; writes down what it grew by."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=world_size)
    grown, plan = grown_bytes(mix, world_size, steps)
    (Path(folder) / f"{index}.json").write_text(json.dumps([grown, *_predicted(plan)]))
    dist.destroy_process_group()


def _predicted(plan: Plan) -> tuple[int, int]:
    return plan.predicted.host_step_bytes, plan.predicted.device_peak_bytes


def work(mix: str, world_size: int, steps: int) -> dict[str, Any]:
    """One case: bytes predicted and measured, of all ranks together."""
    if world_size == 1:
        grown, plan = grown_bytes(mix, 1, steps)
        host, device = _predicted(plan)
    else:
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            ranks = [context.Process(target=rank, args=(i, folder, mix, world_size, steps)) for i in range(world_size)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
            answers = [json.loads((Path(folder) / f"{i}.json").read_text()) for i in range(world_size)]
        grown = sum(answer[0] for answer in answers)
        _, host, device = answers[0]
        device *= world_size
    return {"predicted_host_bytes": host, "predicted_device_bytes": device, "grown_bytes": grown}


def main() -> int:
    """Every mix on every number of ranks; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", nargs=3, metavar=("MIX", "WORLD", "STEPS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work[0], int(args.work[1]), int(args.work[2]))))
        return 0
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MAPPED_FROM_BYTES)
    rows = []
    for world_size in args.worlds:
        for mix in MIXES:
            before = conditions() | {"threads": 1}
            found = run_apart(__file__, mix, str(world_size), str(args.steps), keep_freed=False)
            host, device, grown = (found[f"{name}_bytes"] for name in ("predicted_host", "predicted_device", "grown"))
            errors = {
                "sum_error_percent": round(100 * ((host + device) / grown - 1), 2),
                "host_error_percent": round(100 * (host / (grown - device) - 1), 2),
            }
            rows.append({**before, "model": SHAPE.name, "homes": mix, "world_size": world_size, **found, **errors})
            print(f"{mix}, {world_size} ranks: {errors}", flush=True)
    columns = ("homes", "world_size", "predicted_host_bytes", "predicted_device_bytes", "grown_bytes")
    columns += ("sum_error_percent", "host_error_percent")
    print_table("Peaks of memory", columns, [[row[column] for column in columns] for row in rows])
    if not args.no_record:
        print(append_rows("host_peak", rows))
    return int(any(abs(row["sum_error_percent"]) > 100 * BAR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
