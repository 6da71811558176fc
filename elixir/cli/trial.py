"""Tries a model on this machine: `elixir try`. A few steps of made-up data under a plan, predicted next to measured.

The machine is measured briefly, a plan is made with these rates, and ten steps run under it. Weights and batch are
random, so nothing has to be downloaded; seconds and bytes do not depend on their values.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from elixir.api import wrap
from elixir.hardware.profile import HardwareProfile
from elixir.microbench import measure, measure_briefly
from elixir.models.step import default_input
from elixir.plan.plan import Plan
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
KIND = "trial"
"""The field ``artifact`` of a saved trial."""


@dataclass(frozen=True)
class Compared:
    """One figure of a step, predicted and measured."""

    name: str
    unit: Literal["bytes", "seconds"]
    predicted: float
    measured: float
    range_s: tuple[float, float] | None = None
    """The range that the plan predicts for its seconds."""
    at_times: float = 0.0
    """Predicted bytes that are there only if a copy takes its time: gradients on their way to the host."""

    @property
    def agrees(self) -> bool | None:
        """Whether seconds are within their range, None without one; or bytes within `NEAR` of what was predicted."""
        if self.unit == "seconds":
            return None if self.range_s is None else self.range_s[0] <= self.measured <= self.range_s[1]
        low, high = (1 - NEAR) * (self.predicted - self.at_times), (1 + NEAR) * self.predicted
        return low <= self.measured <= high


@dataclass(frozen=True)
class Trial:
    """Ten steps of one model on this machine, and what was predicted for them."""

    model: str
    machine: HardwareProfile
    plan: Plan
    compared: tuple[Compared, ...]
    steps: tuple[dict[str, float], ...]
    """`StepReport.to_dict` of every timed step."""
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON; `elixir hardware --learn` reads the steps and the machine from it."""
        return {
            "artifact": KIND,
            "model": self.model,
            "versions": self.versions,
            "compared": [{**vars(each), "agrees": each.agrees} for each in self.compared],
            "hardware": self.machine.to_dict(),
            "plan": self.plan.to_dict(),
            "steps": list(self.steps),
        }


def try_model(
    name: str,
    model: nn.Module,
    *,
    batch: int = 1,
    seq: int | None = None,
    inp: Mapping[str, Any] | None = None,
    machine: HardwareProfile | None = None,
    tell: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Trial:
    """Measures this machine, plans a step of the model, and takes ten of them.

    Args:
        name: what the result calls the model.
        model: on meta, to be filled chunk by chunk, or real; it returns a loss, as models of transformers do.
        batch: samples of the made-up batch.
        seq: tokens per sample; None for `default_input`'s default.
        inp: a batch instead of the made-up one.
        machine: a profile; None measures this machine, a CPU for two seconds and a GPU for about a minute.
        tell: called with the plan in words, before its first step.
        options: of `elixir.wrap`, such as ``device_memory`` or ``dtype``.

    Raises:
        InputError: the model takes no made-up batch.
        PlanError: nothing fits; says what is needed and what would help.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    given = dict(default_input(model, batch=batch, seq=seq) if inp is None else inp)
    if machine is None:
        machine = _measured(model, given, device, options.get("dtype"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    settled = {"max_norm": MAX_NORM, "replan": False, "hardware": machine, "verbose": False, **options}
    module, wrapped = wrap(model, optimizer, inp=given, **settled)
    try:
        tell(str(module.plan))
        on_device = {key: value.to(device) if torch.is_tensor(value) else value for key, value in given.items()}
        reports, peak_bytes = _steps(module, wrapped, on_device, device)
        return Trial(
            model=name,
            machine=machine,
            plan=module.plan,
            compared=_compared(module.plan, reports, peak_bytes, device),
            steps=tuple(report.to_dict() for report in reports),
            versions={"torch": torch.__version__, "device": machine.device_name},
        )
    finally:
        module.close()


def _measured(model: nn.Module, inp: Mapping[str, Any], device: torch.device, dtype: Any) -> HardwareProfile:
    if device.type == "cuda":
        return measure(quick=True)
    ids = inp.get("input_ids")
    tokens = ids.numel() if torch.is_tensor(ids) else max(value.shape[0] for value in inp.values())
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    sizes = {"hidden": hidden} if isinstance(hidden, int) else {}
    computed = dtype if isinstance(dtype, torch.dtype) else torch.float32
    return measure_briefly(MEASURING_S, dtype=computed, tokens=tokens, **sizes)


def _steps(
    module: ElixirModule, optimizer: ElixirOptimizer, inp: Mapping[str, Any], device: torch.device
) -> tuple[list[StepReport], int | None]:
    """Reports of the timed steps, and on a CPU the peak of a step that was observed and not timed."""
    reports: list[StepReport] = []
    peak_bytes: int | None = None
    for number in range(STEPS):
        observed = number == WARM_UP_STEPS and device.type == "cpu"
        if observed:
            module.settle()
            arena = engine_of(module).arena
            resting = arena.live_bytes("device") + arena.live_bytes("host") + _input_bytes(inp)
            peak_bytes = resting + allocated_peak(lambda: _step(module, optimizer, inp))
        else:
            _step(module, optimizer, inp)
        if number >= WARM_UP_STEPS and not observed and module.last_report is not None:
            reports.append(module.last_report)
    return reports, peak_bytes


def _step(module: ElixirModule, optimizer: ElixirOptimizer, inp: Mapping[str, Any]) -> None:
    output = module(**inp)  # held until the step is over, as in the step that was traced
    optimizer.backward(output["loss"] if isinstance(output, Mapping) else output.loss)
    optimizer.step()
    optimizer.zero_grad()


def _input_bytes(inp: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in inp.values() if torch.is_tensor(value))


def allocated_peak(call: Callable[[], object]) -> int:
    """Runs `call`; gives the highest sum of what PyTorch allocated on the CPU meanwhile, less what it freed."""
    gc.collect()  # garbage of earlier steps would be freed in the middle of this one
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]) for event in events if event.get("name") == "[memory]"]
    live = peak = 0
    for _, about in sorted(changes, key=lambda change: float(change[0])):
        if about["Device Type"] == 0:
            live += about["Bytes"]
            peak = max(peak, live)
    return int(peak)


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


def _compared(
    plan: Plan, reports: list[StepReport], peak_bytes: int | None, device: torch.device
) -> tuple[Compared, ...]:
    last = reports[-1]
    in_flight = plan.predicted.device_parts.get("gradient_in_flight", 0)
    rows = []
    if peak_bytes is not None:
        predicted = plan.predicted.device_peak_bytes + last.predicted["host_peak"]
        rows.append(Compared("peak, device and host", "bytes", predicted, peak_bytes, at_times=in_flight))
    names = {
        "device_peak": "device peak",
        "device_buffers": "buffers on the device",
        "host_peak": "buffers on the host",
        "host_to_device": "host to device",
        "device_to_host": "device to host",
    }
    for key, name in names.items():
        if key in last.observed and key in last.predicted:
            at_times = in_flight if key == "device_peak" else 0
            rows.append(Compared(name, "bytes", last.predicted[key], last.observed[key], at_times=at_times))
    seconds = [report.step_s for report in reports if report.step_s is not None]
    if seconds:
        median_s = statistics.median(seconds)
        rows.append(Compared("seconds a step", "seconds", plan.predicted.step_s, median_s, plan.predicted.range_s))
    return tuple(rows)
