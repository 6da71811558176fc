"""Common parts of the benchmarks on emulated links: small models, plans by hand, runs that are timed, and calibration.

The runtime's CPU backend: one thread computes, one more works for each lane, and none of them has helpers, so that two
cores are enough. Links are emulated; copies and steps on the host are real work on cores and memory that compute uses,
too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark.common import print_table
from elixir.chunk.lanes import Emulation, ThreadLane
from elixir.hardware.profile import HardwareProfile
from elixir.models.loading import build
from elixir.models.model_shape import ModelShape, describe
from elixir.models.step import default_input, default_step
from elixir.optimizer_states import state_size
from elixir.plan.chunk_plan import Home
from elixir.plan.plan import Plan
from elixir.search.planner import PREFETCH_DEPTH
from elixir.search.problem.placement import Placement, Setting
from elixir.search.propose.candidate import weigh
from elixir.search.propose.judge import Outcome
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.propose.written_plan import to_plan
from elixir.search.request import SearchRequest
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.search.simulator.simulated_cost import can_step
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import Operation, StepTrace
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.step_report import StepReport
from elixir.wrapper.engine import engine_of

ROOT = Path(__file__).resolve().parent.parent
MIXES = ("streamed", "half", "states on host")
WARM, MEASURED = 1, 1
"""Steps of one turn: after a change of link the first still has updates that began before it."""
BLOCK_SHARE = 0.25
"""Share of the streamed chunks that have a block."""
SHAPES: dict[str, tuple[ModelShape, int, int]] = {
    "opt": (describe("opt-125m").changed(name="opt 4x768", layers=4, vocabulary=8192), 1, 160),
    "llama": (
        describe("llama-2-7b").changed(
            name="llama 6x512",
            layers=6,
            hidden=512,
            heads=8,
            kv_heads=8,
            ffn=1376,
            vocabulary=16384,
        ),
        2,
        80,
    ),
}
"""Shape, batch, sequence: below a second of compute on one core. Heads, ffn and vocabulary differ on purpose."""
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(256 << 20)}
"""Environment in which the C library keeps freed memory; see `run_apart`."""
CHUNKS = 20
CONTENTION_STEPS = 8
"""Rounds of an iteration that nears its end by a factor of a few each time."""


def planned(space: SearchSpace, placement: Placement, capacity: int) -> Plan:
    """A plan with these homes, one chunk fetched ahead, few blocks; all chunks are updated early that can be, if any may."""
    model = space.model(capacity)
    streamed = placement.resident.count(False)
    depth = PREFETCH_DEPTH if streamed else 0
    schedule = model.work.schedule(placement.residents, depth)
    blocks = min(max(schedule.min_blocks, round(BLOCK_SHARE * streamed)), streamed)
    if space.setting.early_updates:
        placement = placement.updated_early(can_step(model.work, placement) - placement.state_on_disk)
    candidate = weigh(model, placement, blocks, depth, space.cost)
    budgets = Budgets(candidate.need.device_bytes, candidate.need.host_bytes)
    optimizer = "Muon + AdamW" if space.setting.matrices else "AdamW"
    request = SearchRequest(world_size=space.setting.world_size, optimizer_type=optimizer)
    return to_plan(space, Outcome(candidate), budgets, request)


def homes(mix: str, chunks: int) -> Placement:
    """Homes of weights and states in a mix."""
    if mix == "half":
        return Placement(tuple(Home.RESIDENT if chunk % 2 else Home.HOST for chunk in range(chunks)))
    home = {
        "resident": Home.RESIDENT,
        "streamed": Home.HOST,
        "states on disk": Home.RESIDENT_DISK,
        "streamed, states on disk": Home.HOST_DISK,
    }.get(mix, Home.RESIDENT_HOST)
    return Placement((home,) * chunks)


def mixed_plans(trace: StepTrace, hardware: HardwareProfile, mixes: Sequence[str], **setting: Any) -> list[Plan]:
    """One plan per mix for one rank, all of the same chunks; `setting` as of `Setting`."""
    options = {"moments": "float32", "clipping": False} | setting
    space = SearchSpace(trace, hardware, Setting(1, 1, state_size("AdamW", options["moments"]), True, **options))
    capacity = max(space.table.largest_bytes, -(-space.table.total_bytes // CHUNKS))
    chunks = len(space.model(capacity).work.chunks)
    return [planned(space, homes(mix, chunks), capacity) for mix in mixes]


@dataclasses.dataclass(frozen=True)
class Timed:
    """One measured step, in seconds."""

    forward_s: float
    """Seconds since the end of the step before."""
    backward_s: float
    optimizer_s: float
    report: StepReport

    @property
    def step_s(self) -> float:
        """Seconds from the end of one optimizer step to that of the next."""
        return self.forward_s + self.backward_s + self.optimizer_s


class Run:
    """A model under a plan; every one has the same weights to begin with, and steps with fused AdamW or a kin of it,
    and with Muon if the plan has matrices.

    Options are those of `ElixirOptimizer`, and `disk_folder` of `ElixirModule`.
    """

    def __init__(
        self,
        shape: ModelShape,
        inp: dict[str, Any],
        plan: Plan,
        adam: type[torch.optim.AdamW] = torch.optim.AdamW,
        disk_folder: str | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.plan, self._inp = plan, inp
        model = build(shape, dtype=torch.float32, device="cpu")
        self.module = ElixirModule(model, plan, device="cpu", disk_folder=disk_folder)
        whole = set(plan.matrices)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        others = adam([each for name, each in named if name not in whole], lr=1e-4, fused=True)
        self.optimizer = ElixirOptimizer(self.module, others, **options)
        self._optimizers = [self.optimizer]
        if whole:
            muon = torch.optim.Muon([each for name, each in named if name in whole], lr=1e-4)
            self._optimizers.append(ElixirOptimizer(self.module, muon, **options))

    def link(self, to_device_bytes_per_s: float | None, to_host_bytes_per_s: float | None) -> None:
        """Emulates links of these speeds from now on. One module for all speeds spares the memory of five."""
        lanes = engine_of(self.module).lanes
        for lane in lanes.all():
            if not isinstance(lane, ThreadLane):
                raise SystemExit("only lanes of the CPU backend can be slowed")
            lane._emulation = Emulation(to_host_bytes_per_s if lane is lanes.offload else to_device_bytes_per_s)

    def disk(self, bytes_per_s: float | None) -> None:
        """Emulates a disk of this speed from now on; None: the disk as it is."""
        lane = engine_of(self.module).lanes.disk
        if not isinstance(lane, ThreadLane):
            raise SystemExit("only lanes of the CPU backend can be slowed")
        lane._emulation = Emulation(bytes_per_s)

    def step(self, *, settle: bool = False) -> Timed:
        """One training step; with `settle` it is over when all that the optimizer set going is."""
        started = time.perf_counter()
        self.module.zero_grad()
        loss = self.module(**self._inp).loss
        forward = time.perf_counter()
        self.optimizer.backward(loss)
        backward = time.perf_counter()
        for each in self._optimizers:
            each.step()
        if settle:
            self.module.settle()
        ended = time.perf_counter()
        report = self.module.last_report
        if report is None:
            raise SystemExit("the step left no report")
        return Timed(forward - started, backward - forward, ended - backward, report)

    def turn(self) -> list[Timed]:
        """The measured steps of one turn."""
        return [self.step() for _ in range(WARM + MEASURED)][WARM:]


def median(steps: Sequence[Timed], field: str) -> float:
    """The median of one of the fields of `Timed`."""
    return statistics.median(getattr(step, field) for step in steps)


Case = tuple[str, float | None]
"""Name of a run, and bytes per second of what is emulated; None for what is as fast as it is."""


def traced(model: str, hardware: HardwareProfile) -> tuple[ModelShape, dict[str, Any], StepTrace]:
    """The shape of a model of `SHAPES`, its batch, and its step."""
    shape, batch, sequence = SHAPES[model]
    meta = build(shape, dtype=torch.float32)
    inp = default_input(meta, batch=batch, seq=sequence)
    return shape, inp, trace_step(meta, inp, default_step, hardware=hardware, optimizer=None)


def compute_seconds(resident: Run) -> float:
    """Seconds of forward and backward with everything resident."""
    alone = [step for _ in range(2) for step in resident.turn()]
    return median(alone, "forward_s") + median(alone, "backward_s")


def link_speeds(streamed: Plan, compute_s: float, shares: Sequence[float]) -> list[float]:
    """Bytes a second at which all transfers with everything streamed take these shares of the seconds of compute."""
    moved = streamed.predicted.moved_bytes
    return [(moved["host_to_device"] + moved["device_to_host"]) / (share * compute_s) for share in shares]


def take_turns(
    calibrating: Sequence[Case], judged: Sequence[Case], rounds: int, turn: Callable[[Case], list[Timed]]
) -> dict[Case, list[Timed]]:
    """The steps of each case, which take turns, each round from another one on. Those that calibrate come twice in a
    round, since all else rests on them.

    Args:
        calibrating: cases that are not judged.
        judged: the others.
        rounds: how many turns each of these has.
        turn: makes the steps of one turn.
    """
    middle = len(judged) // 2
    cases = [*calibrating, *judged[:middle], *calibrating, *judged[middle:]]
    seen: dict[Case, list[Timed]] = {case: [] for case in cases}
    for first in range(rounds):
        for index in range(len(cases)):
            case = cases[(index + first) % len(cases)]
            seen[case] += turn(case)
    return seen


def scaled(trace: StepTrace, machine: HardwareProfile, forward: float, backward: float) -> StepTrace:
    """The same step whose compute takes so many times as long in forward, and in what comes after.

    Each access gets one operator that takes its seconds: work alone, scaled, would leave latencies as they were.
    """
    dtype = main_dtype(trace)
    rate = machine.rate(f"elementwise.{dtype}")
    operations: dict[Operation, int] = {}
    accesses = []
    for access, now_s in zip(trace.accesses, Rates(machine, dtype, 1, 1).accesses_s(trace).tolist(), strict=True):
        wanted_s = now_s * (forward if access.phase == "forward" else backward)
        moved = round(max(0.0, wanted_s - rate.latency_s) * rate.per_s)
        operation = Operation("elementwise", dtype, 0, moved)
        known = operations.setdefault(operation, len(operations))
        accesses.append(dataclasses.replace(access, operations=(known,) if moved else ()))
    return dataclasses.replace(trace, operations=tuple(operations), accesses=tuple(accesses))


def lane_rates(steps: Sequence[Timed], plan: Plan) -> dict[str, float]:
    """Rates of a profile from lanes' busy seconds."""

    def busy_s(lane: str) -> float:
        return statistics.median(step.report.busy_s[lane] for step in steps)

    moved = plan.predicted.moved_bytes
    stepped = sum(chunk.numel for chunk in plan.chunks if chunk.trainable and chunk.state_home == "host")
    return {
        "host_to_device_bytes_per_s": moved["host_to_device"] / busy_s("fetch"),
        "device_to_host_bytes_per_s": moved["device_to_host"] / busy_s("offload"),
        "host_adam_numel_per_s": stepped / busy_s("host_adam"),
    }


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Results of the runs that are not judged."""

    machine: HardwareProfile
    trace: StepTrace
    compute: tuple[float, float]
    """Seconds of forward and of backward with everything resident, over those that the profile gives."""
    alone_s: tuple[float, float]
    contention: tuple[float, float]
    """Seconds that compute loses in forward, and in backward, for each second in which lanes work at the same time."""

    def trace_for(self, plan: Plan) -> StepTrace:
        """The step whose compute is as slow as while the lanes of this plan work."""
        factors = [
            factor * (1 + lost * overlap_s / alone_s)
            for factor, lost, overlap_s, alone_s in zip(
                self.compute, self.contention, lane_work_s(plan, self.machine), self.alone_s, strict=True
            )
        ]
        return scaled(self.trace, self.machine, *factors)


def lane_work_s(plan: Plan, machine: HardwareProfile) -> tuple[float, float]:
    """Seconds of real work of the lanes during forward and during backward, whatever link they emulate."""
    copied = [0, 0]
    walk = plan.schedule().simulate(plan.block_count)
    for position, chunk in zip(walk.positions, walk.chunks, strict=True):
        copied[plan.order[position].phase != "forward"] += plan.chunks[chunk].weight_bytes
    hosted = [chunk for chunk in plan.chunks if chunk.trainable and chunk.update_home == "host"]
    forward_s, backward_s = (amount / machine.host_to_device_bytes_per_s for amount in copied)
    returned = sum(chunk.weight_bytes for chunk in hosted if chunk.weight_home == "device")
    updates_s = returned / machine.host_to_device_bytes_per_s
    updates_s += sum(chunk.numel for chunk in hosted) / machine.host_adam_numel_per_s
    forward_s += updates_s
    backward_s += plan.predicted.moved_bytes["device_to_host"] / machine.device_to_host_bytes_per_s
    return forward_s, backward_s


def calibrate(
    trace: StepTrace,
    hardware: HardwareProfile,
    resident: Plan,
    alone: Sequence[Timed],
    streamed: Plan,
    free: Sequence[Timed],
) -> Calibration:
    """Fits rates to the profile, a run with everything resident, and one streamed without emulated links."""
    numel = sum(chunk.numel for chunk in resident.chunks if chunk.trainable)
    rates = lane_rates(free, streamed) | {"device_adam_numel_per_s": numel / median(alone, "optimizer_s")}
    replaced = {name.removesuffix("_bytes_per_s").removesuffix("_numel_per_s") for name in rates}
    fits = {key: fit for key, fit in hardware.fits.items() if key.split(".")[0] not in replaced}
    machine = dataclasses.replace(hardware, fits=fits, **rates)
    phases = ("forward", "backward")
    alone_s = tuple(median(alone, f"{phase}_s") for phase in phases)
    predicted = simulate_step(resident, trace, machine).phases_s
    compute = tuple(seconds / predicted[phase] for seconds, phase in zip(alone_s, phases, strict=True))
    overlap_s = lane_work_s(streamed, machine)
    found = Calibration(machine, trace, compute, alone_s, (0.0, 0.0))
    for _ in range(CONTENTION_STEPS):
        predicted = simulate_step(streamed, found.trace_for(streamed), machine).phases_s
        contention = tuple(
            max(0.0, lost + (median(free, f"{phase}_s") - predicted[phase]) / lane_s)
            for lost, phase, lane_s in zip(found.contention, phases, overlap_s, strict=True)
        )
        found = dataclasses.replace(found, contention=contention)
    return found


def with_products(machine: HardwareProfile, trace: StepTrace, resident: Plan, optimizer_s: float) -> HardwareProfile:
    """The machine whose products of square matrices take what is left of the step of a plan with matrices.

    Args:
        machine: calibrated.
        trace: the step.
        resident: the plan, with everything resident.
        optimizer_s: measured seconds of its optimizers.
    """
    key = "matmul.bfloat16.square"
    fit = machine.rate(key)

    def at(per_s: float) -> HardwareProfile:
        return dataclasses.replace(machine, fits=machine.fits | {key: dataclasses.replace(fit, per_s=per_s)})

    slow, fast = (simulate_step(resident, trace, at(share * fit.per_s)).phases_s["optimizer"] for share in (0.5, 1.0))
    products_s = slow - fast  # at the fitted rate
    return at(fit.per_s * products_s / (optimizer_s - fast + products_s))


def with_error(case: dict[str, Any]) -> dict[str, Any]:
    """A row of one case: its seconds rounded, and the error of the simulated ones."""
    error = {"error_percent": round(100 * (case["simulated_s"] / case["measured_s"] - 1), 2)}
    return case | {name: round(case[name], 4) for name in _SECONDS} | error


def judge_errors(
    title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]], mean_bar: float, worst_bar: float
) -> bool:
    """Prints what `with_error` made; whether a bar is missed, mean or worst error as a share."""
    shown = (*columns, *_SECONDS, "error_percent")
    print_table(title, shown, [[row[column] for column in shown] for row in rows])
    errors = [abs(row["error_percent"]) / 100 for row in rows]
    mean, worst = statistics.mean(errors), max(errors)
    print(
        f"error over {len(rows)} cases: mean {mean:.1%} (bar {mean_bar:.0%}), worst {worst:.1%} (bar {worst_bar:.0%})"
    )
    return mean > mean_bar or worst > worst_bar


_SECONDS = ("measured_s", "p20_s", "p80_s", "simulated_s")


def run_apart(script: str, *arguments: str) -> Any:
    """The JSON that ``script --work ARGUMENTS`` prints last, from a process in which nothing else has run.

    The C library keeps freed memory there, as a device's caching allocator does. Otherwise large tensors would be given
    back and faulted in again, page by page: seconds of compute that come and go with what else is allocated, which no
    model of a device has. (glibc's variables; see mallopt(3).)
    """
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **KEEP_FREED}
    command = [sys.executable, script, "--work", *arguments]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return json.loads(done.stdout.splitlines()[-1])
