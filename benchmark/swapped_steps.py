"""Seconds of steps that move activations to the host, as simulated, compared with seconds as measured.

    python benchmark/swapped_steps.py [--rounds 3] [--no-record]

The runtime's CPU backend with emulated links. The layers sleep in place of computing, in forward and in backward, so
that a busy machine measures nearly the same. Two sorts of swapping (the input of layers that run again; all that layers
save), with weights on the device and streamed, at three link speeds: a layer's activations take 0.4, 0.9 and 1.6 of the
seconds of its forward. Compute is scaled by steps of the
same plan without a link. A measured step is a median. Appends to ``results/swapped_steps.csv``; fails if the mean of the
absolute errors is above 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmark.common import Row, append_rows, conditions
from benchmark.emulated_runs import judge_errors, make_space, planned, with_error
from elixir.chunk.lanes import Emulation, ThreadLane
from elixir.hardware.profile import HardwareProfile, preset
from elixir.plan.chunk_plan import Home
from elixir.search.problem.placement import Placement
from elixir.search.simulator.rates import with_link_speed
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import INPUT, SAVED, Result, StepTrace, UnitActivations
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.engine import engine_of

LAYERS, WIDTH, ROWS = 8, 64, 4096
LAYER_S = 0.25
"""Seconds of a layer's forward, and of its backward."""
MEMORY_BYTES_PER_S = 1e12
"""The memory of the machine that is simulated; a trace has a sleep as an operator over many bytes."""
SHARES, MEAN_BAR, WORST_BAR = (0.4, 0.9, 1.6), 0.05, 0.12
SORTS = {"inputs": ((), INPUT), "whole": (None, SAVED)}
HOMES = {"resident": Home.RESIDENT, "streamed": Home.HOST}


class _Sleep(torch.autograd.Function):
    """Takes its time, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _work(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _work(gradient)
        return gradient


def _work(tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        tensor.new_empty(1).expand(round(LAYER_S * MEMORY_BYTES_PER_S / tensor.itemsize)).sum()
    else:
        time.sleep(LAYER_S)


class Layer(nn.Module):
    """A product, and a wait; saves two tensors of the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(self.product(x))  # type: ignore[no-untyped-call]
        return slept.tanh()


class Model(nn.Module):
    """Layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def machine() -> HardwareProfile:
    """A machine on which nothing takes time but sleeping and the link."""
    fast = dict.fromkeys(
        ("host_adam_numel_per_s", "device_adam_numel_per_s", "host_memory_bytes_per_s"), 1000000000000000.0
    )
    return replace(
        preset("cpu"),
        flops_per_s={"float32": 1e18},
        device_memory_bytes_per_s=MEMORY_BYTES_PER_S,
        sustained_memory_share=None,
        sustained_flops_share=None,
        sustained_attention_share=None,
        launch_s=None,
        contention=None,
        fits={},
        **fast,
    )


def traced(sort: str, inp: dict[str, Any], hardware: HardwareProfile) -> StepTrace:
    """The step in which all layers but the last move activations."""
    keep, operator = SORTS[sort]
    own = [UnitActivations(f"layers.{number}", keep, (Result(operator, 0),)) for number in range(LAYERS - 1)]
    own += [UnitActivations(f"layers.{LAYERS - 1}", keep)]

    def step(model: nn.Module, batch: dict[str, Any]) -> None:
        model(**batch).backward()

    return trace_step(Model(), inp, step, hardware=hardware, optimizer=None, activations=tuple(own))


def cases(sort: str, homes: str, rounds: int) -> list[Row]:
    """The cases of one plan, which take turns with a run without a link, by which compute is scaled."""
    torch.manual_seed(0)
    hardware, inp = machine(), {"x": torch.randn(ROWS, WIDTH)}
    trace = traced(sort, inp, hardware)
    moved = trace.step.swap_bytes / (LAYERS - 1)
    speeds = [moved / (share * LAYER_S) for share in SHARES]
    space = make_space(trace, hardware)
    capacity = space.table.total_bytes // LAYERS
    plan = planned(space, Placement.everywhere(HOMES[homes], len(space.model(capacity).work.chunks)), capacity)
    model = ElixirModule(Model(), plan, device="cpu")
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    seconds: dict[float | None, list[float]] = {speed: [] for speed in (None, *speeds)}
    for number in range(rounds + 1):
        for speed, steps in seconds.items():
            for lane in engine_of(model).lanes.all():
                if isinstance(lane, ThreadLane):
                    lane._emulation = Emulation(speed)
            started = time.perf_counter()
            optimizer.backward(model(**inp))
            optimizer.step()
            optimizer.zero_grad()
            if number:
                steps.append(time.perf_counter() - started)
    model.close()
    scale = statistics.median(seconds[None]) / simulate_step(plan, trace, hardware).step_s
    found = []
    for share, speed in zip(SHARES, speeds, strict=True):
        steps = sorted(seconds[speed])
        simulated = simulate_step(plan, trace, with_link_speed(hardware, speed), compute_scale=scale)
        row = {"activations": sort, "weights": homes, "transfers_over_forward": share, "link_bytes_per_s": round(speed)}
        row |= {"compute_scale": round(scale, 4), "n": rounds, "simulated_s": simulated.step_s}
        found.append(with_error(row | {"measured_s": statistics.median(steps), "p20_s": steps[0], "p80_s": steps[-1]}))
    return found


def main() -> int:
    """Runs, records, and compares with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [{**conditions(), **row} for sort in SORTS for homes in HOMES for row in cases(sort, homes, args.rounds)]
    missed = judge_errors(
        "Simulated and measured steps", ("activations", "weights", "transfers_over_forward"), rows, MEAN_BAR, WORST_BAR
    )
    if not args.no_record:
        print(append_rows("swapped_steps", rows))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
