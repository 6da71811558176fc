"""Steps of several micro-batches in one pass, next to the same accumulation in a loop: bytes, seconds, and simulation.

    python benchmark/one_pass_speed.py [--rounds 3] [--no-record]

The runtime's CPU backend with all chunks on the host and emulated links (`emulated_runs`), layers checkpointed, clipping
on. Loops and passes take turns on links on which one pass over all weights takes `SHARES` times the compute of a
micro-batch. The rows say

* bytes over the link either way, as counted and as predicted, over those of one micro-batch;
* seconds, and CPU seconds of the process, of a pass over those of a loop: medians of the ratios of neighbours;
* simulated seconds of a step in passes over measured ones. The simulation is calibrated on steps that are not judged:
  rates, as in `simulated_vs_measured`, on one micro-batch with everything resident, and with everything streamed without
  a link; the seconds of compute of a micro-batch, Python's own work included, on passes of `COUNTS[1]` without a link.

Appends to ``results/one_pass_speed.csv``; fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import append_rows, conditions, print_table
from benchmark.emulated_runs import (
    CHUNKS,
    Calibration,
    Run,
    Timed,
    calibrate,
    homes,
    lane_work_s,
    make_space,
    median,
    planned,
    run_apart,
    scaled,
    take_turns,
)
from elixir.hardware.profile import preset
from elixir.models.loading import build
from elixir.models.model_shape import describe
from elixir.models.step import default_input, default_step
from elixir.plan.plan import Plan
from elixir.search.problem.pass_trace import pass_trace
from elixir.search.simulator.rates import with_link_speed
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer

SHAPE = describe("llama-2-7b").changed(
    name="llama 4x256", layers=4, hidden=256, heads=4, kv_heads=4, ffn=688, vocabulary=2048
)
BATCH, SEQUENCE = 1, 96
"""Some 70 ms of compute a micro-batch on one core: with much less, waits of threads for each other are most of a step."""
COUNTS = (1, 4, 16)
SHARES = (4.0, 0.25)
"""Seconds of one pass of all weights over the link, over those of a micro-batch's compute."""
SECONDS_BARS = {4.0: 0.25, 0.25: 1.03}
BYTES_BAR, ERROR_BAR = 1.1, 0.05
CALIBRATION_STEPS = 40
"""Halvings of an interval, to the rounding of numbers."""


class Accumulating(Run):
    """A model under a plan, each of whose steps takes several micro-batches by `ElixirOptimizer.accumulate`."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        model = build(SHAPE, dtype=torch.float32, device="cpu", checkpoint="non-reentrant")
        self.plan = plan
        self.batches = [default_input(model, batch=BATCH, seq=SEQUENCE)] * plan.accumulation
        self.module = ElixirModule(model, plan, device="cpu")
        adam = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        self.optimizer = ElixirOptimizer(self.module, adam, max_norm=1.0)
        self.cpu_s: list[float] = []

    def step(self, *, settle: bool = False) -> Timed:
        """One training step; a pass has no forward that is apart from its backward."""
        forward_s = 0.0

        def step_fn(module: Any, batch: Any) -> None:
            nonlocal forward_s
            begun = time.perf_counter()
            loss = module(**batch).loss / len(self.batches)
            forward_s += time.perf_counter() - begun
            self.optimizer.backward(loss)

        started, cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        self.optimizer.accumulate(step_fn, self.batches)
        backward = time.perf_counter()
        self.optimizer.step()
        if settle:
            self.module.settle()
        ended = time.perf_counter()
        self.cpu_s.append(time.process_time() - cpu)
        forward_s = forward_s if self.plan.pass_size == 1 else 0.0
        report = self.module.last_report
        if report is None:
            raise SystemExit("the step left no report")
        return Timed(forward_s, backward - started - forward_s, ended - backward, report)


def made_plan(trace: StepTrace, hardware: Any, mix: str, count: int, size: int) -> Plan:
    """A plan of `count` micro-batches in passes of `size`."""
    of_pass = pass_trace(trace, size)
    space = make_space(of_pass, hardware, accumulation=count // size, clipping=True)
    capacity = max(space.table.largest_bytes, -(-space.table.total_bytes // CHUNKS))
    return planned(space, homes(mix, len(space.model(capacity).work.chunks)), capacity)


def trace_for(known: Calibration, plan: Plan) -> StepTrace:
    """The step whose compute is as slow as while the lanes of this plan work; see `Calibration.trace_for`."""
    moved = {name: nbytes // plan.passes for name, nbytes in plan.predicted.moved_bytes.items()}
    a_pass = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, moved_bytes=moved))
    factors = [
        factor * (1 + lost * overlap_s / (plan.pass_size * alone_s))
        for factor, lost, overlap_s, alone_s in zip(
            known.compute, known.contention, lane_work_s(a_pass, known.machine), known.alone_s, strict=True
        )
    ]
    return scaled(known.trace, known.machine, *factors)


def compute_scale(known: Calibration, plan: Plan, step_s: float) -> float:
    """The factor on seconds of compute with which a step of this plan takes so long without emulated links."""
    trace, low, high = trace_for(known, plan), 0.1, 10.0
    for _ in range(CALIBRATION_STEPS):
        middle = math.sqrt(low * high)
        found = simulate_step(plan, trace, known.machine, compute_scale=middle).step_s
        low, high = (middle, high) if found < step_s else (low, middle)
    return math.sqrt(low * high)


def work(rounds: int) -> list[dict[str, Any]]:
    """All cases: measured seconds and bytes, and what was simulated."""
    torch.set_num_threads(1)
    hardware = preset("cpu")  # all of whose rates that matter are calibrated
    model = build(SHAPE, dtype=torch.float32, checkpoint="non-reentrant")
    inp = default_input(model, batch=BATCH, seq=SEQUENCE)
    trace = trace_step(model, inp, default_step, hardware=hardware, optimizer=None)
    plans = {
        "resident": made_plan(trace, hardware, "resident", 1, 1),
        "streamed": made_plan(trace, hardware, "streamed", 1, 1),
        **{f"loop {n}": made_plan(trace, hardware, "streamed", n, 1) for n in COUNTS[1:]},
        **{f"pass {n}": made_plan(trace, hardware, "streamed", n, n) for n in COUNTS[1:]},
    }
    runs = {name: Accumulating(plan) for name, plan in plans.items()}
    weights = sum(chunk.weight_bytes for chunk in plans["streamed"].chunks)
    alone = [step for _ in range(6) for step in runs["resident"].turn()]
    compute_s = median(alone, "forward_s") + median(alone, "backward_s")
    speeds = {share: weights / (share * compute_s) for share in SHARES}

    cpu: dict[tuple[str, float | None], list[float]] = {}

    def turn(case: tuple[str, float | None]) -> list[Timed]:
        name, speed = case
        runs[name].link(speed, speed)
        found = runs[name].turn()
        cpu.setdefault(case, []).append(runs[name].cpu_s[-1])
        return found

    judged = [(f"{kind} {n}", speed) for speed in speeds.values() for n in COUNTS[1:] for kind in ("loop", "pass")]
    lone_pass = (f"pass {COUNTS[1]}", None)
    seen = take_turns([("resident", None), ("streamed", None), lone_pass], judged, rounds, turn)
    calibrating = seen["resident", None], plans["streamed"], seen["streamed", None]
    known = calibrate(trace, hardware, plans["resident"], *calibrating)
    one = seen["streamed", None][-1].report.observed
    scale = compute_scale(known, plans[lone_pass[0]], statistics.median(step.step_s for step in seen[lone_pass]))
    found = []
    for share, speed in speeds.items():
        for n in COUNTS[1:]:
            loop, one_pass = seen[f"loop {n}", speed], seen[f"pass {n}", speed]
            plan, report = plans[f"pass {n}"], one_pass[-1].report
            machine = with_link_speed(known.machine, speed)
            pairs = list(zip(loop, one_pass, strict=True))
            simulated_s = simulate_step(plan, trace_for(known, plan), machine, compute_scale=scale).step_s
            cpu_pairs = zip(cpu[f"loop {n}", speed], cpu[f"pass {n}", speed], strict=True)
            found.append(
                {
                    "micro_batches": n,
                    "link_over_compute": share,
                    "loop_s": statistics.median(step.step_s for step in loop),
                    "pass_s": statistics.median(step.step_s for step in one_pass),
                    "ratio": statistics.median(b.step_s / a.step_s for a, b in pairs),
                    "cpu_ratio": statistics.median(b / a for a, b in cpu_pairs),
                    "simulated_s": simulated_s,
                    "simulated_ratio": simulated_s
                    / simulate_step(plans[f"loop {n}"], trace_for(known, plans[f"loop {n}"]), machine).step_s,
                    "to_device_over_one": report.observed["host_to_device"] / one["host_to_device"],
                    "to_host_over_one": report.observed["device_to_host"] / one["device_to_host"],
                    "loop_to_device_over_one": loop[-1].report.observed["host_to_device"] / one["host_to_device"],
                    "loop_to_host_over_one": loop[-1].report.observed["device_to_host"] / one["device_to_host"],
                    "as_predicted": all(
                        report.observed[way] == report.predicted[way]
                        for way in ("host_to_device", "device_to_host", "loads")
                    ),
                    "n": len(pairs),
                }
            )
    for run in runs.values():
        run.module.close()
    return found


def missed_bars(rows: list[dict[str, Any]]) -> list[str]:
    """The figures that are worse than their bars, in words."""
    missed = []
    for row in rows:
        where = f"{row['micro_batches']} micro-batches, link {row['link_over_compute']} times compute"
        if not row["as_predicted"] or max(row["to_device_over_one"], row["to_host_over_one"]) > BYTES_BAR:
            missed.append(f"bytes with {where}")
        if row["micro_batches"] == COUNTS[-1] and row["ratio"] > SECONDS_BARS[row["link_over_compute"]]:
            missed.append(f"seconds with {where}: {row['ratio']}")
    error = statistics.mean(abs(row["error_percent"]) / 100 for row in rows)
    print(f"simulated over measured: mean error {error:.1%} (bar {ERROR_BAR:.0%})")
    return [*missed, f"simulation: {error:.1%}"] if error > ERROR_BAR else missed


def main() -> int:
    """Runs, records, and compares with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", nargs=1, metavar="ROUNDS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(int(args.work[0]))))
        return 0
    before = conditions() | {"threads": 1}
    rows = []
    for row in run_apart(__file__, str(args.rounds)):
        row["error_percent"] = round(100 * (row["simulated_s"] / row["pass_s"] - 1), 2)
        rows.append({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
    print_table("One pass next to a loop", list(rows[0]), [list(row.values()) for row in rows])
    missed = missed_bars(rows)
    if not args.no_record:
        print(append_rows("one_pass_speed", [{**before, "model": SHAPE.name, **row} for row in rows]))
    for each in missed:
        print(f"missed: {each}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
