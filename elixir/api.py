"""One call from a model and its optimizer to a training that runs under a plan: `wrap`.

It traces one step, searches a plan on rank 0, sends it to all ranks and wraps both. After the first steps it compares
what they took with what was predicted, and where that pays moves the chunks once to the homes of a better plan.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir.chunk.group import Group
from elixir.default_step import default_input, default_step
from elixir.errors import ElixirError, InputError, InputTypeError, RankError
from elixir.hardware import HardwareProfile, warn_if_doubtful, warn_if_other_device
from elixir.host_threads import check_host_threads
from elixir.plan import Plan
from elixir.search.budgets import host_memory_here
from elixir.search.planner import HomeChoice, plan_from_trace
from elixir.search.replan import Observation, correct
from elixir.search.searches import profile_for
from elixir.search.states import family_of, moments_of
from elixir.tracer import trace_step
from elixir.tracer.step_trace import StepTrace
from elixir.units import parse_dtype
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.backward_steps import clips_in_backward
from elixir.wrapper.build import compute_device
from elixir.wrapper.report import StepReport

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
"""Steps that are not measured: the first allocate."""
MEASURED_STEPS = 3
MOST_REFUSALS = 5
"""Steps after which chunks are left where they are, since gradients have been there whenever a forward began."""


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    inp: Mapping[str, Any] | None = None,
    step_fn: Callable[[nn.Module, Any], Any] | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: str | torch.dtype | None = None,
    hardware: HardwareProfile | str | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    placement: HomeChoice = "auto",
    max_norm: float | None = None,
    initial_scale: float = 2.0**16,
    host_threads: int | None = None,
    replan: bool = True,
    moments: str | None = None,
    accumulation: int = 1,
    step_in_backward: bool = False,
    **options: Any,
) -> tuple[ElixirModule, ElixirOptimizer]:
    """Trace, search and wrap; the numbers are those of plain PyTorch, whatever is planned.

    >>> model, optimizer = elixir.wrap(model, optimizer, inp=batch)  # doctest: +SKIP

    Args:
        model: what is trained; real, or on meta, to be filled chunk by chunk.
        optimizer: over the model's parameters, not stepped yet.
        inp: one rank's batch, as a dict; None takes a documented default (Hugging Face models only).
        step_fn: ``step_fn(model, inp)`` runs forward, loss and backward; None takes ``model(**inp).loss``.
        group: process group; None means the default one, or a single rank where there is none.
        dtype: parameters and floating inputs are cast to it; None leaves them.
        hardware: a profile, a preset's name or a file; None for the machine at hand, without a GPU its CPU.
        device_memory: budget of one device, bytes or text such as ``"20GiB"``; None for what is free.
        host_memory: budget of one machine, all its ranks together; None for what is free.
        placement: ``auto``, or ``cuda`` / ``cpu`` to keep everything there.
        max_norm: clip the global gradient norm.
        initial_scale: of the loss, with float16.
        host_threads: of this rank's Adam on the host; None for its part of the cores, less what computes beside it.
        replan: compare the first steps with the plan, and move chunks once where a better one is found.
        moments: how Adam's are kept: ``float32``, ``bfloat16`` or ``8bit``; None: as a `HybridAdam` says, else float32.
        accumulation: batches like `inp` per optimizer step.
        step_in_backward: the host updates chunks while backward still runs; for steps of one backward, without `max_norm`
            and not in float16. Nothing may look at weights or go back between backward and `step`.
        options: further arguments of `ElixirModule`, such as ``weights``.

    Raises:
        PlanError: nothing fits; says what is needed and what would help.
        TraceError, InputError, InputTypeError: see `trace_step`, `plan_from_trace`, `ElixirModule`, `ElixirOptimizer`.
        RankError: another rank could not plan.
    """
    if not isinstance(model, nn.Module) or isinstance(model, ElixirModule):
        raise InputTypeError(f"model must be a plain nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputTypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    own = set(model.parameters())
    foreign = sum(parameter not in own for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise InputError(
            f"{foreign} parameters of the optimizer are not the model's; make it over model.parameters() of this very model"
        )
    check_host_threads(host_threads)
    if step_in_backward and max_norm:
        raise clips_in_backward()
    if hardware is None and compute_device(options.get("device")).type == "cpu":
        hardware = "cpu"  # this is a run, so what is planned for is where it runs
    profile = profile_for(hardware)
    planning = Group(group)
    try:
        plan, trace = _planned(
            planning,
            model,
            optimizer,
            inp,
            step_fn,
            dtype,
            profile,
            device_memory,
            host_memory,
            placement,
            known=hardware is not None,
            use_fused_kernels=options.get("use_fused_kernels", False),
            moments=moments,
            accumulation=accumulation,
            step_in_backward=step_in_backward,
        )
    finally:
        planning.close()
    if profile.device_kind == "cpu":
        options.setdefault("device", "cpu")
    module = ElixirModule(model, plan, group, **options)
    wrapped = ElixirOptimizer(
        module, optimizer, initial_scale=initial_scale, max_norm=max_norm, host_threads=host_threads
    )
    if replan and placement == "auto":
        module.before_forward = _Replanning(module, wrapped, trace, profile)
    return module, wrapped


def _planned(
    group: Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inp: Mapping[str, Any] | None,
    step_fn: Callable[[nn.Module, Any], Any] | None,
    dtype: str | torch.dtype | None,
    profile: HardwareProfile,
    device_memory: str | int | None,
    host_memory: str | int | None,
    placement: HomeChoice,
    *,
    known: bool,
    use_fused_kernels: bool | Mapping[str, str],
    moments: str | None,
    accumulation: int,
    step_in_backward: bool,
) -> tuple[Plan, StepTrace | None]:
    """Rank 0's plan on every rank; the trace stays on rank 0, the only one that may plan again."""
    trace: StepTrace | None = None
    answer: tuple[str | None, str | None] = (None, None)
    problem: Exception | None = None
    if group.rank == 0:
        try:
            warn_if_other_device(profile)
            warn_if_doubtful(profile)
            if not known and host_memory is None:
                host_memory = host_memory_here(profile)
            if inp is not None and not isinstance(inp, Mapping):
                raise InputTypeError(f"inp must be a dict of the model's inputs, got {type(inp).__name__}")
            batch = default_input(model) if inp is None else dict(inp)
            wanted = None if dtype is None else parse_dtype(dtype)
            trace = trace_step(
                model,
                batch,
                step_fn or default_step,
                dtype=wanted,
                hardware=profile,
                optimizer=None,
                use_fused_kernels=use_fused_kernels,
            )
            plan = plan_from_trace(
                trace,
                profile,
                group.size,
                optimizer_type=family_of(optimizer),
                device_memory=device_memory,
                host_memory=host_memory,
                placement=placement,
                moments=moments_of(optimizer, moments),
                accumulation=accumulation,
                step_in_backward=step_in_backward,
            )
            answer = (plan.to_json(), None)
        except Exception as error:  # the others must hear of it, whatever it is
            problem, answer = error, (None, str(error))
    text, refused = group.exchange("plan", answer)[0]
    if problem is not None:
        raise problem
    if text is None:
        raise RankError(f"rank 0 could not plan: {refused}")
    return Plan.from_json(text), trace


class _Replanning:
    """Watches the first steps from the beginnings of forwards, and corrects the plan once."""

    def __init__(
        self, module: ElixirModule, optimizer: ElixirOptimizer, trace: StepTrace | None, hardware: HardwareProfile
    ) -> None:
        self._module, self._optimizer, self._trace, self._hardware = module, optimizer, trace, hardware
        self._seen: StepReport | None = None
        self._reports: list[StepReport] = []
        self._batches: list[int] = []  # forwards of each step
        self._forwards = 0  # since the last step
        self._cuda = module.device.type == "cuda"

    def __call__(self) -> None:
        module = self._module
        if not torch.is_grad_enabled():
            return
        report = module.last_report
        if report is not None and report is not self._seen and report.span is not None:
            self._seen = report
            self._reports.append(report)
            self._batches.append(self._forwards)
            self._forwards = 0
            if self._cuda and len(self._reports) == WARM_UP_STEPS:
                torch.cuda.reset_peak_memory_stats(module.device)
        self._forwards += 1
        if len(self._reports) < WARM_UP_STEPS + MEASURED_STEPS:
            return
        if len(self._reports) > WARM_UP_STEPS + MEASURED_STEPS + MOST_REFUSALS:
            module.before_forward = None
            logger.info(
                "the plan stays: gradients of the step before are held at every forward; call zero_grad() before it"
            )
            return
        answers = module.exchange("observations", (module.holds_gradients(), self._observation()))
        if any(holds for holds, _ in answers):
            return  # between two micro-batches; the next forward asks again
        module.before_forward = None
        text: str | None = None
        if self._trace is not None:
            text = self._corrected(self._trace, [seen for _, seen in answers])
        text = module.exchange("second plan", text)[0]
        if text is not None:
            module.rehome(Plan.from_json(text))

    def _corrected(self, trace: StepTrace, observations: list[Observation]) -> str | None:
        plan = self._module.plan
        try:
            correction = correct(trace, self._hardware, plan, observations, plan.optimizer)
            if correction.plan is not None:
                self._optimizer.check_plan(correction.plan)
        except ElixirError as error:  # a training that runs is not ended by a plan that cannot be bettered
            logger.warning("the plan could not be compared with the first steps: %s", error)
            return None
        logger.info("after %d steps: %s", len(self._reports), correction.reason)
        return None if correction.plan is None else correction.plan.to_json()

    def _observation(self) -> Observation:
        reports = self._reports[WARM_UP_STEPS:]
        count = len(reports)
        last = reports[-1]
        predicted = self._module.plan.predicted.device_peak_bytes
        if self._cuda:
            device_peak = torch.cuda.max_memory_allocated(self._module.device)
        else:  # what the runtime does not make itself is not known apart from the host's memory
            device_peak = predicted + max(last.observed["device_peak"] - last.device_limit_bytes, 0)
        return Observation(
            step_s=statistics.median(report.step_s for report in reports if report.step_s is not None),
            busy_s={
                lane: sum(report.busy_s[lane] for report in reports) / count
                for lane in ("fetch", "offload", "host_adam", "refresh")
            },
            fetched_bytes=sum(r.observed["host_to_device"] - r.refreshed_bytes for r in reports) / count,
            refreshed_bytes=sum(r.refreshed_bytes for r in reports) / count,
            offloaded_bytes=sum(r.observed["device_to_host"] for r in reports) / count,
            device_peak_bytes=device_peak,
            host_peak_bytes=last.observed["host_peak"],
            batches=statistics.median_low(self._batches[WARM_UP_STEPS:]),
        )
