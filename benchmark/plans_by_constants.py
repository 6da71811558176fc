"""A plan by the machine's own speeds against plans by the first Elixir's constants: both run on an emulated machine.

    python benchmark/plans_by_constants.py [--rounds 9] [--no-record]

The first Elixir knew one machine: 16.3 n + 8.7 GB/s to the device, 15.8 n + 2.3 GB/s back, Adam at 50 n G elements/s on
the GPU and at 1.66 ln n + 5.15 on the host, n = 1 here. **Scaling**: a parameter's transfer and its update on the host
take, here and there, the same share of the compute that a step spends on it. There: 8 FLOPs per parameter and token (2
forward, 4 backward, 2 recompute), `A100_TOKENS`, `A100_FLOPS`, and 2 bytes per parameter. Here: what forward and
backward were measured to take with everything resident, and 4 bytes. Adam on the device is what it is here.

The machines are that one with links four times slower, with Adam on the host four times slower, and with both. Links
are emulated by the lanes of the CPU backend, Adam by `SlowAdamW`, which takes its time only on the lane of the host's
Adam.

Plans, each for the same device budget (shares of what everything resident takes):

* ``ours``: the search, with the speeds of the emulated machine;
* ``constants``: the same search, with the constants scaled as above, but neither link nor Adam slowed;
* ``rule``: what the first Elixir's own rule chooses (`original_rule`), its smallest chunk scaled to the model.

Where `simulate_step`, calibrated as in `simulated_vs_measured`, says that ours is at least 1.3 times as fast as
another, both are measured, in turns. Fails where the median of the measured ratios is not what was said within 10 %, or
where there was nothing to measure. Appends to ``results/plans_by_constants.csv``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark import original_rule
from benchmark.common import append_rows, conditions, percentiles, print_table
from benchmark.emulated_runs import (
    SHAPES,
    Calibration,
    Run,
    calibrate,
    make_space,
    median,
    mixed_plans,
    run_apart,
)
from elixir.hardware.profile import HardwareProfile
from elixir.models.loading import build
from elixir.models.step import default_input, default_step
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.planner import PREFETCH_DEPTH
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.propose.written_plan import to_plan
from elixir.search.simulator.simulation import simulate_step
from elixir.tracer.trace import trace_step

MODEL = "opt"
A100_FLOPS = 0.5 * 312e12
"""Half of an A100's bf16 peak (NVIDIA's data sheet): what large models reach there."""
A100_TOKENS = 8 * 1024
"""Batch and sequence in the middle of the first Elixir's grid."""
FLOPS_PER_TOKEN = 8
GPUS = 1
TO_DEVICE, TO_HOST = (16.3 * GPUS + 8.7) * 1e9, (15.8 * GPUS + 2.3) * 1e9
HOST_ADAM = (1.66 * math.log(GPUS) + 5.15) * 1e9
SMALLEST_MODEL = 4e9
"""Parameters of the smallest model of its grid, for which its smallest chunk is 32 MiB."""

SLOWER: dict[str, tuple[float, float]] = {"link / 4": (4.0, 1.0), "Adam / 4": (1.0, 4.0), "both / 4": (4.0, 4.0)}
"""Factor by which links and CPU Adam are slower than the scaled constants."""
BUDGET_SHARES = (0.5, 0.8, 0.9)
WORTH_MEASURING, BAR = 1.3, 0.10
CALIBRATING_TURNS = 7
HOST_MEMORY = "64GiB"
HOST_ADAM_THREAD = "elixir host adam"


class SlowAdamW(torch.optim.AdamW):
    """AdamW that takes as long as at `numel_per_s`, where it steps on the lane of the host's Adam."""

    numel_per_s = math.inf

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.AdamW.step`; then sleep for what is left."""
        started = time.perf_counter()
        result = super().step(closure)
        if threading.current_thread().name == HOST_ADAM_THREAD:
            stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            left = sum(parameter.numel() for parameter in stepped) / self.numel_per_s - (time.perf_counter() - started)
            if left > 0:
                time.sleep(left)
        return result


@dataclasses.dataclass(frozen=True)
class Emulated:
    """The first Elixir's machine in the proportions of this one, slowed or not."""

    known: Calibration
    stretch: float
    """Seconds here for each second there."""

    def machine(self, link: float = 1.0, adam: float = 1.0) -> HardwareProfile:
        """A machine slowed by a factor; a sleep can only add, so nothing gets faster than it is."""
        here, ours, theirs = self.known.machine, torch.float32.itemsize, torch.bfloat16.itemsize
        rates = {
            "host_to_device_bytes_per_s": TO_DEVICE * ours / theirs / self.stretch / link,
            "device_to_host_bytes_per_s": TO_HOST * ours / theirs / self.stretch / link,
            "host_adam_numel_per_s": HOST_ADAM / self.stretch / adam,
        }
        for name, rate in rates.items():
            if rate > getattr(here, name):
                raise SystemExit(f"{name} of {rate:.3g} cannot be emulated where {getattr(here, name):.3g} is reached")
        return dataclasses.replace(here, name=f"links / {link:g}, Adam / {adam:g}", **rates)


def calibrated(rounds: int) -> tuple[Emulated, dict[str, Any], Plan]:
    """The emulated machine; the batch; the plan with everything resident."""
    from elixir.microbench import measure

    shape, batch, sequence = SHAPES[MODEL]
    hardware = measure(quick=True)
    model = build(shape, dtype=torch.float32)
    inp = default_input(model, batch=batch, seq=sequence)
    trace = trace_step(model, inp, default_step, hardware=hardware, optimizer=None)
    plans = mixed_plans(trace, hardware, ("resident", "streamed"))
    runs = [Run(shape, inp, plan) for plan in plans]
    seen = [[step for _ in range(rounds) for step in run.turn()] for run in runs]
    for run in runs:
        run.module.close()
    known = calibrate(trace, hardware, plans[0], seen[0], plans[1], seen[1])
    compute_s = median(seen[0], "forward_s") + median(seen[0], "backward_s")
    return Emulated(known, compute_s / trace.numel / (FLOPS_PER_TOKEN * A100_TOKENS / A100_FLOPS)), inp, plans[0]


def rules_plan(space: SearchSpace, rule: original_rule.OriginalRule, device_bytes: int) -> Plan | None:
    """The first Elixir's choice as a plan of ours."""
    choice = rule.choose(device_bytes)
    if choice is None:
        return None
    candidate = choice.candidate(space, PREFETCH_DEPTH)
    return to_plan(space, candidate, Budgets(device_bytes, candidate.need.host_bytes), "AdamW", "auto")


def work(rounds: int) -> list[dict[str, Any]]:
    """Every case worth measuring, and what was said of the others."""
    torch.set_num_threads(1)
    emulated, inp, resident = calibrated(CALIBRATING_TURNS)
    constants = emulated.machine()
    trace = emulated.known.trace_for(resident)
    original_rule.SMALLEST_BYTES = int(original_rule.SMALLEST_BYTES * trace.numel / SMALLEST_MODEL)
    space = make_space(trace, constants)
    rule = original_rule.OriginalRule(trace, space.setting)
    found = []
    for share in BUDGET_SHARES:
        budget = int(share * resident.predicted.device_peak_bytes)
        budgets: dict[str, Any] = {"device_memory": budget, "host_budget": HOST_MEMORY, "early_updates": False}
        others = {
            "constants": plan_from_trace(trace, constants, 1, **budgets).plan,
            "rule": rules_plan(space, rule, budget),
        }
        for slow, (link, adam) in SLOWER.items():
            machine = emulated.machine(link, adam)
            plans = {"ours": plan_from_trace(trace, machine, 1, **budgets).plan, **others}
            said_s = {
                name: simulate_step(plan, emulated.known.trace_for(plan), machine).step_s
                for name, plan in plans.items()
                if plan is not None
            }
            worth = [name for name in said_s if said_s[name] >= WORTH_MEASURING * said_s["ours"]]
            about = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in said_s.items())
            print(f"{slow}, {share:.0%} of the device: {about}", file=sys.stderr)
            chosen = {name: plan for name in ("ours", *worth) if (plan := plans[name]) is not None}
            seconds = in_turns(chosen, machine, inp, rounds) if worth else {}
            for name in worth:
                found.append(
                    {"machine": slow, "device_share": share, "other": name, **_case("ours", name, said_s, seconds)}
                )
    return found


def in_turns(
    plans: dict[str, Plan], machine: HardwareProfile, inp: dict[str, Any], rounds: int
) -> dict[str, list[float]]:
    """Seconds of steps under each plan, on the emulated machine; every round begins with another one."""
    SlowAdamW.numel_per_s = machine.host_adam_numel_per_s
    runs = {name: Run(SHAPES[MODEL][0], inp, plan, SlowAdamW) for name, plan in plans.items()}
    for run in runs.values():
        run.link(machine.host_to_device_bytes_per_s, machine.device_to_host_bytes_per_s)
        run.turn()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]
            seconds[name] += [step.step_s for step in runs[name].turn()]
    for run in runs.values():
        run.module.close()
    return seconds


def _case(ours: str, other: str, said_s: dict[str, float], seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [theirs / mine for mine, theirs in zip(seconds[ours], seconds[other], strict=True)]
    p20, p50, p80 = percentiles(ratios)
    said = said_s[other] / said_s[ours]
    return {
        "ours_simulated_s": round(said_s[ours], 4),
        "ours_measured_s": round(statistics.median(seconds[ours]), 4),
        "other_simulated_s": round(said_s[other], 4),
        "other_measured_s": round(statistics.median(seconds[other]), 4),
        "said": round(said, 3),
        "p20": round(p20, 3),
        "p50": round(p50, 3),
        "p80": round(p80, 3),
        "n": len(ratios),
        "off_percent": round(100 * (p50 / said - 1), 2),
    }


def main() -> int:
    """Runs, records, and compares with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", metavar="ROUNDS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(int(args.work))))
        return 0
    before = conditions() | {"threads": 1, "model": SHAPES[MODEL][0].name}
    cases = run_apart(__file__, str(args.rounds))
    if not cases:
        print(f"no other plan is said to take {WORTH_MEASURING} times as long as ours: nothing measured")
        return 1
    print_table("Ours over plans by other constants", list(cases[0]), [list(case.values()) for case in cases])
    if not args.no_record:
        print(append_rows("plans_by_constants", [before | case for case in cases]))
    return int(any(abs(case["off_percent"]) > 100 * BAR for case in cases))


if __name__ == "__main__":
    sys.exit(main())
