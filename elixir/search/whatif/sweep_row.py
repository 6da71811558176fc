"""One combination of model, batch, machine and world size, tried on paper: traced, planned, simulated, in one row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from elixir.errors import ElixirError, InputError, PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.activations import activations_text
from elixir.plan.plan import Plan
from elixir.plan.process_need import must_be_free_bytes
from elixir.search.advise.activations import that_keeps_everything, trace_that_keeps
from elixir.search.advise.answer import Answer
from elixir.search.budgets import resolve_budgets
from elixir.search.planner import plan_or_shortage, setting_for
from elixir.search.propose.shortage import lacks_device, live_bytes, room
from elixir.search.propose.sizes import Budgets
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.searches import with_exact_moves
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.step_trace import StepTrace
from elixir.units import dtype_name, parse_bytes

HOST_PER_DEVICE_BYTE = 2
"""Host memory of a machine that says nothing of it, per byte of device memory in use on it.

Assumption: machines are bought with about so much; a DGX H200 has 2 TB with 8 x 141 GB (NVIDIA, DGX H200 datasheet).
"""


@dataclass(frozen=True)
class SweepRow:
    """One combination: whether it fits, and what its plan would do. What is not known is None."""

    model: str
    machine: str
    world_size: int
    batch: int
    """Samples per rank."""
    seq: int | None
    """Tokens per sample; None where samples are no tokens."""
    dtype: str
    fits: bool
    reason: str
    """The reason why not, in one sentence; empty if it fits."""
    device_budget_bytes: int
    """Bytes of one device."""
    host_budget_bytes: int
    """Bytes of one machine, all its ranks together."""
    step_s: float | None = None
    samples_per_s: float | None = None
    """Samples of all ranks together."""
    tokens_per_s: float | None = None
    """Tokens of all ranks together."""
    fastest_s: float | None = None
    """The least that a step may take, as far as rates are uncertain; `slowest_s` is the most."""
    slowest_s: float | None = None
    device_flops_per_s: float | None = None
    """FLOP/s of one device, recomputed work included."""
    peak_share: float | None = None
    """`device_flops_per_s` over the device's published peak."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    bound_by: str | None = None
    """The resource with most seconds on the critical path of the step."""
    chunks: int | None = None
    resident_chunks: int | None = None
    weights_on_host_chunks: int | None = None
    states_on_host_chunks: int | None = None
    block_count: int | None = None
    host_to_device_bytes: int | None = None
    """Per rank and step."""
    device_to_host_bytes: int | None = None
    network_bytes: int | None = None
    disk_budget_bytes: int = 0
    """Bytes of one machine, like the host's."""
    disk_peak_bytes: int | None = None
    states_on_disk_chunks: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    accumulation: int = 1
    """Micro-batches of an optimizer step, `batch` samples each."""
    replicas_bytes: int | None = None
    """Per rank and step, between replicas."""
    activations: str | None = None
    """The results that layers keep or move, in words, where that was chosen."""
    must_be_free_bytes: int | None = None
    """Bytes of one machine that all its processes take, libraries and programs included."""
    ranks_per_host: int | None = None
    """Ranks on one machine."""


@dataclass
class Traces:
    """Traces by what they depend on: the model, the batch, and of the machine only its kind and compute capability."""

    step: StepQuestion
    _models: dict[str, nn.Module] = field(default_factory=dict)
    _known: dict[tuple[object, ...], StepTrace | ElixirError] = field(default_factory=dict)
    _kinds: dict[tuple[object, ...], dict[Any, Any]] = field(default_factory=dict)

    def get(self, model: str, batch: int, hardware: HardwareProfile, request: SearchRequest) -> StepTrace:
        """The step of one combination, with activations that are chosen for it if the request says so."""
        step = replace(self.step, model=model, batch=batch)
        key = (model, batch, hardware.device_kind, hardware.compute_capability)
        if key not in self._known:
            try:
                built = self._built(step)
                asked = step if request.activations is None else that_keeps_everything(step, built)
                self._known[key] = asked.trace(hardware, built, self._kinds.setdefault(key, {}))
            except ElixirError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, ElixirError):
            raise found
        return (
            found
            if request.activations is None
            else trace_that_keeps(step, hardware, request, self._built(step), found, self._kinds[key])
        )

    def exact(self, answer: Answer, model: str, batch: int) -> Answer:
        """The answer with the bytes of what it moves."""
        step = replace(self.step, model=model, batch=batch)
        return with_exact_moves(answer, step, self._models.get(model))

    def _built(self, step: StepQuestion) -> nn.Module:
        model = str(step.model)
        if model not in self._models:
            self._models.clear()  # models come one after the other, and some configs make large ones
            self._models[model] = step.build()
        return self._models[model]


def budgets_on_paper(hardware: HardwareProfile, request: SearchRequest) -> Budgets:
    """Budgets of a machine that need not be here: given, from its profile, or by `HOST_PER_DEVICE_BYTE`."""
    unknown = hardware.device_memory_bytes
    if hardware.device_kind != "cpu":
        unknown *= HOST_PER_DEVICE_BYTE * hardware.ranks_per_host(request.world_size)
    return resolve_budgets(hardware, request, unknown_host_bytes=unknown, on_paper=True)


def try_out(
    traces: Traces, request: SearchRequest, model: str, batch: int, hardware: HardwareProfile
) -> tuple[SweepRow, ElixirError | None]:
    """The row of one combination, and what stood in its way."""
    disk_bytes = 0 if request.disk_memory is None else parse_bytes(request.disk_memory)
    budgets = replace(budgets_on_paper(hardware, request), disk_bytes=disk_bytes)
    dtype, world_size = traces.step.torch_dtype, request.world_size
    known: dict[str, Any] = {
        "model": model,
        "machine": hardware.name,
        "world_size": world_size,
        "batch": batch,
        "accumulation": request.accumulation,
        "seq": traces.step.seq,
        "dtype": "as built" if dtype is None else dtype_name(dtype),
        "device_budget_bytes": budgets.device_bytes,
        "host_budget_bytes": budgets.host_bytes,
        "disk_budget_bytes": disk_bytes,
    }
    try:
        _check_network(hardware, world_size)
        found = replace(request, device_memory=budgets.device_bytes, device_reserve=None, host_reserve=None)
        if budgets.machine_bytes is None:
            found = replace(found, host_memory=None, host_budget=budgets.host_bytes)
        trace = traces.get(model, batch, hardware, found)
        known["model"], known["batch"] = trace.model_name, trace.step.samples or batch
        known["seq"] = trace.step.seq
        _check_room(trace, hardware, request, budgets)
        question = Question(trace, hardware, replace(found, activations=None))
        answer = traces.exact(Answer(plan_or_shortage(*question), question), model, batch)
        plan, step = answer.plan, simulate_step(answer.plan, answer.question.trace, hardware)
    except ElixirError as error:
        if isinstance(error, PlanError) and budgets.device_slack_bytes:
            full = replace(request, device_memory=budgets.with_slack().device_bytes, device_reserve=None)
            row, problem = try_out(traces, full, model, batch, hardware)
            if problem is None:
                return row, None
        return SweepRow(**known, fits=False, reason=str(error).splitlines()[0]), error
    known["ranks_per_host"] = hardware.ranks_per_host(world_size)
    return SweepRow(**known, fits=True, reason="", **_measures(plan, step, known["batch"], hardware)), None


def _measures(plan: Plan, step: Simulation, samples: int, hardware: HardwareProfile) -> dict[str, Any]:
    predicted = plan.predicted
    fastest_s, slowest_s = predicted.range_s or (None, None)
    per_s = plan.world_size * plan.accumulation / step.step_s if step.step_s else None
    return {
        "step_s": step.step_s,
        "samples_per_s": None if per_s is None else samples * per_s,
        "tokens_per_s": None if per_s is None or plan.step.tokens is None else plan.step.tokens * per_s,
        "fastest_s": fastest_s,
        "slowest_s": slowest_s,
        "device_flops_per_s": predicted.flops_per_s,
        "peak_share": predicted.peak_share,
        "device_peak_bytes": predicted.device_peak_bytes,
        "host_peak_bytes": predicted.host_peak_bytes,
        "must_be_free_bytes": must_be_free_bytes(plan, hardware),
        "disk_peak_bytes": predicted.disk_peak_bytes,
        "bound_by": step.bound_by,
        "activations": activations_text(plan.activations) or None,
        **plan.counts,
        "block_count": plan.block_count,
        **{f"{link}_bytes": amount for link, amount in predicted.moved_bytes.items()},
    }


def with_network(
    hardware: HardwareProfile, network_bytes_per_s: float | None, devices_per_host: int | None = None
) -> HardwareProfile:
    """The machine with this bandwidth between machines, per machine and direction, and so many devices in each; as it
    is where None is given."""
    given = {"network_bytes_per_s": network_bytes_per_s, "devices_per_host": devices_per_host}
    return replace(hardware, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _check_network(hardware: HardwareProfile, world_size: int) -> None:
    if world_size > hardware.ranks_per_host(world_size) and hardware.network_bytes_per_s is None:
        raise InputError(
            f"{hardware.name} has {hardware.devices_per_host} devices a machine; for {world_size} give the network's "
            f"bandwidth between machines, or devices_per_host={world_size} (--devices-per-host) if one has as many"
        )


def _check_room(trace: StepTrace, hardware: HardwareProfile, request: SearchRequest, budgets: Budgets) -> None:
    """Refuses what cannot fit however it is placed, before a search that would take seconds to say so."""
    needed, there = room(trace, setting_for(trace, hardware, request), budgets)
    if needed > there:
        raise PlanError(
            f"{trace.model_name}: weights and optimizer states exceed device and host memory"
            f"{', and the disk,' if budgets.disk_bytes else ''} together",
            needed_bytes=needed,
            available_bytes=there,
        )
    if lacks_device(trace, budgets):
        raise PlanError(
            f"{trace.model_name}: activations, inputs and buffers alone exceed the device memory, wherever weights are",
            needed_bytes=live_bytes(trace),
            available_bytes=budgets.device_bytes,
        )
