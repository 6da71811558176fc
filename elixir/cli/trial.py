"""``elixir try``: a few steps of a model on this machine, of made-up data under a plan, predicted next to measured.

The machine is measured briefly, a plan is made with these rates, and ten steps run under it. Weights and batch are
random, so nothing has to be downloaded; seconds and bytes do not depend on their values.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.profiler import ProfilerActivity, profile

from elixir.api import wrap
from elixir.artifact import write_atomically
from elixir.cli import files, output
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.microbench import measure, measure_briefly
from elixir.models.flash_attention import attend_by_document
from elixir.models.loading import build
from elixir.models.packing import Packing
from elixir.models.step import default_input, with_tensors
from elixir.plan.plan import Plan
from elixir.search.question import StepQuestion
from elixir.show import tables
from elixir.show.page import plan_view
from elixir.torch_private import MEMORY_MOVES
from elixir.units import format_bytes, format_seconds, parse_dtype
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.step_report import StepReport
from elixir.wrapper.engine import engine_of

STEPS = 10
WARM_UP_STEPS = 2
"""The first steps of these allocate and compile, and are not timed."""
MEASURING_S = 2.0
"""How long a CPU is measured."""
LEARNING_RATE = 1e-4
MAX_NORM = 1.0
NEAR = 0.002
"""Share of predicted bytes by which observed ones may differ: a loss, a norm, what is rounded up to a page."""
MOST_RANGE = 2.0
"""Upper end of the printed range of seconds over its lower end: a wider one says little."""
Compared = dict[str, Any]
"""One figure of a step: its ``name`` and ``unit`` (bytes or seconds), as ``predicted`` and as ``measured``; the
``range_s`` of predicted seconds; and whether it ``agrees``: seconds are in that range, bytes within `NEAR`."""


def run_try(args: argparse.Namespace) -> Iterator[output.Said]:
    """Measures the machine, plans, takes ten steps, and prints what was predicted next to what was measured."""
    files.refuse_artifact(args.model)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = parse_dtype(args.dtype or ("bf16" if device.type == "cuda" else "fp32"))
    names = ("device_memory", "host_memory", "host_budget", "moments")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    model = build(args.model, dtype=dtype, checkpoint=args.checkpoint or "none")
    packing = None if args.packed is None else Packing.read(args.packed)
    if packing is not None and packing.flash:
        if device.type == "cpu":
            raise InputError("flash attention runs on CUDA, and this machine has none; leave out :flash")
        attend_by_document(model)
    inp = default_input(model, batch=args.batch or 1, seq=args.seq, packed=packing and packing.documents)
    machine = measure(quick=True) if device.type == "cuda" else _measured(model, inp, dtype)
    adam = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    settled: dict[str, Any] = {"max_norm": MAX_NORM, "replan": False, "hardware": machine, "verbose": False}
    module, optimizer = wrap(model, adam, inp=inp, dtype=dtype, **settled, **given)
    plan = module.plan
    try:
        yield str(plan)
        reports, peak_bytes = _steps(module, optimizer, with_tensors(lambda each: each.to(device), inp))
    finally:
        module.close()
    compared = _compared(plan, reports, peak_bytes)
    record = {
        "artifact": files.TRIAL,
        "model": args.model,
        "versions": {"torch": torch.__version__, "device": machine.device_name},
        "compared": compared,
        "hardware": machine.to_dict(),  # this and the steps are what `elixir hardware --learn` reads
        "plan": plan.to_dict(),
        "steps": [report.to_dict() for report in reports],
    }
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"

    def views() -> list[dict[str, Any]]:
        asked: dict[str, Any] = {name: getattr(args, name) for name in ("seq", "packed")}
        asked |= {"batch": args.batch or 1, "checkpoint": args.checkpoint or "none"}
        step = StepQuestion(model=args.model, dtype=dtype, **asked)
        return [plan_view(plan, step.trace(machine), machine, measured=compared)]

    drawn = files.plotted(args.plot, views)
    written = files.written((args.out, lambda path: write_atomically(path, text)), drawn)
    yield record
    rows = []
    for each in compared:
        shown = format_bytes if each["unit"] == "bytes" else format_seconds
        rows.append([each["name"], shown(each["predicted"]), shown(each["measured"]), _verdict(each)])
    title = f"{args.model}: {STEPS} steps on {machine.device_name}"
    yield tables.list_table(title, ("of one step", "predicted", "measured", ""), rows)
    missed = ", ".join(each["name"] for each in compared if each["agrees"] is False)
    said = f"Not as predicted: {missed}. Other work on the machine changes seconds alone." if missed else ""
    said = said or "All as predicted."
    low_s, high_s = plan.predicted.range_s or (1.0, 1.0)
    if high_s > MOST_RANGE * low_s:
        said += f" The range spans a factor of {high_s / low_s:.1f}: `elixir hardware --measure` narrows it."
    yield f"{said} --out FILE saves this, to hand on or for `elixir hardware --learn FILE --out hw.json`."
    yield from written


def _verdict(each: Compared) -> str:
    if each["range_s"] is not None:
        low_s, high_s = map(format_seconds, each["range_s"])
        return f"{'within' if each['agrees'] else 'NOT within'} {low_s} to {high_s}"
    return "" if each["agrees"] is None else "as predicted" if each["agrees"] else "NOT as predicted"


def _measured(model: nn.Module, inp: Mapping[str, Any], dtype: torch.dtype) -> HardwareProfile:
    """This CPU, measured with products as long and as wide as those of the model."""
    ids = inp.get("input_ids")
    tokens = max(value.shape[0] for value in inp.values()) if ids is None else ids.numel()
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    sizes = {"hidden": hidden} if isinstance(hidden, int) else {}
    return measure_briefly(MEASURING_S, dtype=dtype, tokens=tokens, **sizes)


def _steps(
    module: ElixirModule, optimizer: ElixirOptimizer, inp: Mapping[str, Any]
) -> tuple[list[StepReport], int | None]:
    """Reports of the timed steps, and on a CPU the peak of a step that was observed and not timed.

    There is no peak before torch 2.13 with blocks, which then take memory anew in each step: what they held before
    would count twice.
    """

    def step() -> None:
        output = module(**inp)  # held until the step is over, as in the step that was traced
        optimizer.backward(output["loss"] if isinstance(output, Mapping) else output.loss)
        optimizer.step()
        optimizer.zero_grad()

    reports: list[StepReport] = []
    peak_bytes: int | None = None
    inp_bytes = sum(value.nbytes for value in inp.values() if isinstance(value, torch.Tensor))
    for number in range(STEPS):
        if number == WARM_UP_STEPS and module.device.type == "cpu" and (MEMORY_MOVES or not module.plan.block_count):
            module.settle()
            arena = engine_of(module).arena
            resting = arena.live_bytes("device") + arena.live_bytes("host")
            peak_bytes = resting + inp_bytes + allocated_peak(step)
            continue
        step()
        if number >= WARM_UP_STEPS and module.last_report is not None:
            reports.append(module.last_report)
    return reports, peak_bytes


def allocated_peak(call: Callable[[], object]) -> int:
    """Runs `call`; gives the highest sum of what PyTorch allocated on the CPU meanwhile, less what it freed."""
    gc.collect()  # garbage of earlier steps would be freed in the middle of this one
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results: Any = profiler.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == MEMORY_EVENT_NAME]
    changes = sorted(changes, key=lambda event: event.start_ns())
    return int(max(0, *accumulate(event.nbytes() for event in changes if event.device_type().name == "CPU")))


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Drops what is written to standard error: the profiler's C++ side writes two lines at every use."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _compared(plan: Plan, reports: list[StepReport], peak_bytes: int | None) -> list[Compared]:
    last, predicted = reports[-1], plan.predicted
    # There only if a copy takes its time: gradients on their way to the host.
    in_flight = predicted.device_parts.get("gradient_in_flight", 0)
    rows = []
    if peak_bytes is not None:
        expected = predicted.device_peak_bytes + last.predicted["host_peak"]
        rows.append(compared_bytes("peak, device and host", expected, peak_bytes, in_flight))
    for key, name in (
        ("device_peak", "device peak"),
        ("device_buffers", "buffers on the device"),
        ("host_peak", "buffers on the host"),
        ("host_to_device", "host to device"),
        ("device_to_host", "device to host"),
    ):
        if key in last.observed and key in last.predicted:
            at_times = in_flight if key == "device_peak" else 0
            rows.append(compared_bytes(name, last.predicted[key], last.observed[key], at_times))
    seconds = [report.step_s for report in reports if report.step_s is not None]
    if seconds:
        median_s, between = statistics.median(seconds), predicted.range_s
        agrees = None if between is None else between[0] <= median_s <= between[1]
        rows.append(_figure("seconds a step", "seconds", predicted.step_s, median_s, agrees, between))
    return rows


def compared_bytes(name: str, predicted: float, measured: float, at_times: float = 0.0) -> Compared:
    """Predicted bytes next to measured ones, which may lack those that are there `at_times`."""
    agrees = (1 - NEAR) * (predicted - at_times) <= measured <= (1 + NEAR) * predicted
    return _figure(name, "bytes", predicted, measured, agrees, None)


def _figure(*values: Any) -> Compared:
    return dict(zip(("name", "unit", "predicted", "measured", "agrees", "range_s"), values, strict=True))
