"""One call from a model and its optimizer to a training that runs under a plan: `wrap`.

It traces one step, searches a plan on rank 0, sends it to all ranks and wraps both. After the first steps it compares
what they took with what was predicted, and where that pays moves the chunks once to the homes of a better plan.
"""

from __future__ import annotations

import inspect
import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir.chunk.group import Group
from elixir.errors import ElixirError, InputError, InputTypeError, RankError
from elixir.hardware import HardwareProfile, check_host_threads
from elixir.optimizer_states import family_of, moments_of
from elixir.plan import Plan
from elixir.search.replan import Observation, correct
from elixir.search.request import Function, SearchRequest, check_options, options_of, takes
from elixir.search.searches import Traced, profile_for
from elixir.step_trace import StepTrace
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account import StepReport
from elixir.wrapper.build import compute_device
from elixir.wrapper.engine import engine_of
from elixir.wrapper.step import clips_in_backward

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
"""Steps that are not measured: the first allocate."""
MEASURED_STEPS = 3
MOST_REFUSALS = 5
"""Steps after which chunks are left where they are, since gradients have been there whenever a forward began."""


_SETTLED = ("world_size", "optimizer_type", "clipping")
"""Options of a search that the process group, the optimizer and `max_norm` settle."""
_OPTIONS = options_of(SearchRequest, without=_SETTLED)
_OPTIONS["moments"] = _OPTIONS["moments"].replace(default=None)
_MODULE_OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(ElixirModule).parameters.items()
    if name not in ("module", "plan", "group", "dtype")
}


def _with_options(function: Function) -> Function:
    """`help` and `inspect.signature` show all options instead of ``**options``."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    more = _OPTIONS | _MODULE_OPTIONS
    return takes([*own, *(parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in more.values())])(function)


@_with_options
def wrap(  # noqa: PLR0913 - a public entry point
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    inp: Mapping[str, Any] | None = None,
    step_fn: Callable[[nn.Module, Any], Any] | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: str | torch.dtype | None = None,
    hardware: HardwareProfile | str | None = None,
    max_norm: float | None = None,
    initial_scale: float = 2.0**16,
    host_threads: int | None = None,
    replan: bool = True,
    **options: Any,
) -> tuple[ElixirModule, ElixirOptimizer]:
    """Trace, search and wrap; the numbers are those of plain PyTorch, whatever is planned.

    >>> model, optimizer = elixir.wrap(model, optimizer, inp=batch)  # doctest: +SKIP

    Args:
        model: what is trained; real, or on meta, to be filled chunk by chunk.
        optimizer: over the model's parameters, not stepped yet.
        inp: one rank's batch, as a dict; None takes a documented default (Hugging Face models only).
        step_fn: ``step_fn(model, inp)`` runs forward, loss and backward; None takes ``model(**inp).loss``.
        group: process group; None means the default one, or a single rank without one.
        dtype: parameters and floating inputs are cast to it; None leaves them.
        hardware: a profile, a preset's name or a file; None for the machine at hand, without a GPU its CPU.
        max_norm: clip the global gradient norm; the plan counts what that takes.
        initial_scale: of the loss, with float16.
        host_threads: of this rank's Adam on the host; None for its part of the cores, less what computes meanwhile.
        replan: compare the first steps with the plan, and move chunks once if a better one is found.
        options: fields of `elixir.search.request.SearchRequest`, such as ``device_memory`` or ``accumulation``, and
            further arguments of `ElixirModule`, such as ``weights``. ``moments=None`` keeps them as a `HybridAdam`
            says, otherwise in float32.

    Raises:
        PlanError: nothing fits; says what is needed and what would help.
        TraceError, InputError, InputTypeError: see `trace_step`, `SearchRequest`, `ElixirModule`, `ElixirOptimizer`.
        RankError: another rank could not plan.
    """
    check_options("argument of wrap", options, {*_OPTIONS, *_MODULE_OPTIONS})
    if not isinstance(model, nn.Module) or isinstance(model, ElixirModule):
        raise InputTypeError(f"model must be a plain nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputTypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    own = set(model.parameters())
    foreign = sum(parameter not in own for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise InputError(
            f"{foreign} parameters of the optimizer are not the model's; make it over model.parameters() of this very "
            "model"
        )
    check_host_threads(host_threads)
    if options.get("step_in_backward") and max_norm:
        raise clips_in_backward()
    if hardware is None and compute_device(options.get("device")).type == "cpu":
        hardware = "cpu"  # this is a run, so what is planned for is where it runs
    profile = profile_for(hardware)
    fused = options.get("use_fused_kernels", False)
    how = Traced(unified_dtype=dtype, inp=inp, step_fn=step_fn, hardware=hardware, use_fused_kernels=fused)
    asked = {name: options[name] for name in _OPTIONS if name in options}

    def make_plan(world_size: int) -> tuple[Plan, StepTrace]:
        family, moments = family_of(optimizer), moments_of(optimizer, asked.get("moments"))
        settled = {"optimizer_type": family, "moments": moments, "clipping": bool(max_norm)}
        return how.plan(model, profile, SearchRequest(**{**asked, **settled, "world_size": world_size}))

    planning = Group(group)
    try:
        plan, trace = _planned(planning, make_plan)
    finally:
        planning.close()
    for_module = {name: value for name, value in options.items() if name in _MODULE_OPTIONS}
    if profile.device_kind == "cpu":
        for_module.setdefault("device", "cpu")
    module = ElixirModule(model, plan, group, **for_module)
    wrapped = ElixirOptimizer(
        module, optimizer, initial_scale=initial_scale, max_norm=max_norm, host_threads=host_threads
    )
    if replan and plan.placement == "auto":
        engine_of(module).before_forward = _Replanning(module, trace, profile)
    return module, wrapped


def _planned(group: Group, make_plan: Callable[[int], tuple[Plan, StepTrace]]) -> tuple[Plan, StepTrace | None]:
    """Rank 0's plan on every rank; the trace stays on rank 0, the only one that may plan again."""
    trace: StepTrace | None = None
    answer: tuple[str | None, str | None] = (None, None)
    problem: Exception | None = None
    if group.rank == 0:
        try:
            plan, trace = make_plan(group.size)
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

    def __init__(self, module: ElixirModule, trace: StepTrace | None, hardware: HardwareProfile) -> None:
        self._module, self._trace, self._hardware = module, trace, hardware
        self._seen: StepReport | None = None
        self._reports: list[StepReport] = []
        self._batches: list[int] = []  # forwards of each step
        self._forwards = 0  # since the last step
        self._cuda = module.device.type == "cuda"

    def __call__(self) -> None:
        module = self._module
        if not torch.is_grad_enabled():
            return
        engine = engine_of(module)
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
            engine.before_forward = None
            logger.info(
                "the plan stays: gradients of the step before are held at every forward; call zero_grad() before it"
            )
            return
        answers = engine.exchange("observations", (engine.holds_gradients(), self._observation()))
        if any(holds for holds, _ in answers):
            return  # between two micro-batches; the next forward asks again
        engine.before_forward = None
        text: str | None = None
        if self._trace is not None:
            text = self._corrected(self._trace, [seen for _, seen in answers])
        text = engine.exchange("second plan", text)[0]
        if text is not None:
            module.rehome(Plan.from_json(text))

    def _corrected(self, trace: StepTrace, observations: list[Observation]) -> str | None:
        plan = self._module.plan
        try:
            correction = correct(trace, self._hardware, plan, observations, plan.optimizer)
            if correction.plan is not None:
                for stepper in engine_of(self._module).steppers:
                    stepper.check_plan(correction.plan)
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
