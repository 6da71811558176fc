"""One call from a model and its optimizer to a training that runs under a plan: `wrap`.

It traces one step, searches a plan on rank 0, sends it to all ranks and wraps both. After the first steps it compares
what they took with what was predicted, and where that pays moves the chunks once to the homes of a better plan.
"""

from __future__ import annotations

import inspect
import logging
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import torch
from torch import nn

from elixir.chunk.group import GivenGroup, Group
from elixir.errors import ElixirError, InputError, InputTypeError
from elixir.hardware.host_share import check_host_threads
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.promises import MachineView, least_free, unequal
from elixir.kernels.adam.step import COPIED, ONE_PASS
from elixir.models.layer_units import layers_compiled
from elixir.models.plannable import refuse_compiled
from elixir.models.quantised import unwrapped_subclasses
from elixir.optimizer_states import LOOPS, check_decay, check_kind, moments_of, with_average
from elixir.plan.chunk_plan import WeightFile
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.search.budgets import is_this_machine
from elixir.search.question import StepQuestion
from elixir.search.replan import EarlyShares, Observation, correct
from elixir.search.request import FREE_HERE, Function, SearchRequest, bound, check_options, options_of, takes
from elixir.search.searches import answer_to, profile_for
from elixir.step_trace import StepTrace
from elixir.units import parse_dtype
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.step_report import EarlyCounts, StepReport
from elixir.wrapper.assemble.chunks import agree_on_plan, compute_device
from elixir.wrapper.assemble.frozen_weights import safetensors_in, weight_records
from elixir.wrapper.assemble.weight_source import check_weights
from elixir.wrapper.engine import engine_of
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.optimizer import check_given, families_of, stepper_of
from elixir.wrapper.run_options import folders_of
from elixir.wrapper.step.user_optimizer import check_average, check_optimizer, copies_states

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
"""Steps that are not measured: the first allocate."""
MEASURED_STEPS = 3
MOST_REFUSALS = 5
"""Steps after which chunks are left where they are, since gradients have been there whenever a forward began."""


_SETTLED = ("world_size", "optimizer_type", "matrices", "free")
"""Options of a search that the process group, its machines and the optimizer settle."""
_OPTIONS = options_of(SearchRequest, without=_SETTLED)
_OPTIONS["moments"] = _OPTIONS["moments"].replace(default=None)
_MODULE_OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(ElixirModule).parameters.items()
    if name not in ("module", "plan", "group", "dtype")
}
_MODULE_OPTIONS["strict"] = _MODULE_OPTIONS["strict"].replace(default=None, annotation="bool | None")


def option_names() -> frozenset[str]:
    """Names of all arguments of `wrap` but the model and its optimizer."""
    return frozenset(inspect.signature(wrap).parameters) - {"model", "optimizer"}


def _with_options(function: Function) -> Function:
    """`help` and `inspect.signature` show all options instead of ``**options``."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    more = _OPTIONS | _MODULE_OPTIONS
    return takes([*own, *(parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in more.values())])(function)


@overload
def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> tuple[ElixirModule, ElixirOptimizer]: ...


@overload
def wrap(
    model: nn.Module, optimizer: Sequence[torch.optim.Optimizer], **options: Any
) -> tuple[ElixirModule, list[ElixirOptimizer]]: ...


@_with_options
def wrap(  # noqa: PLR0913 - a public entry point
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    plan: Plan | HasPlan | str | os.PathLike[str] | None = None,
    inp: Any = None,
    step_fn: Callable[[nn.Module, Any], Any] | None = None,
    group: GivenGroup = None,
    dtype: str | torch.dtype | None = None,
    hardware: HardwareProfile | str | None = None,
    max_norm: float | None = None,
    initial_scale: float = 2.0**16,
    host_threads: int | None = None,
    ema: float | None = None,
    replan: bool = True,
    verbose: bool | None = None,
    compile: bool | Mapping[str, Any] = False,
    **options: Any,
) -> tuple[ElixirModule, Any]:
    """Traces, searches and wraps; the numbers are those of plain PyTorch, whatever is planned: on one rank in float32
    to the bit, if the optimizer step runs on the same kind of device, and with a number as its learning rate: it steps
    with the number that a tensor on a CUDA device holds, where torch rounds to float32 on the way.

    >>> model, optimizer = elixir.wrap(model, optimizer, inp=batch)  # doctest: +SKIP

    Args:
        model: what is trained; real, or on meta, to be filled chunk by chunk.
        optimizer: over the model's parameters, not stepped yet; or several, which share them: of one
            family, or `torch.optim.Muon` for matrices and another family for all else.
        plan: one that was made before, alone or in a search's answer, or its file; nothing is traced and searched then,
            and options of a search are refused.
        inp: one rank's batch, of any kind if there is a `step_fn`, otherwise a dict; None takes a documented default
            (Hugging Face models only).
        step_fn: ``step_fn(model, inp)`` runs forward, loss and backward; None takes ``model(**inp).loss``.
        group: process group; None means the default one, or a single rank without one.
        dtype: parameters and floating inputs are cast to it; None leaves them.
        hardware: a profile, a preset's name or a file; None for the machine at hand, without a GPU its CPU.
        max_norm: clip the global gradient norm, of several optimizers that of all; the plan counts what that takes.
        initial_scale: of the loss, with float16.
        host_threads: of this rank's Adam on the host; None for its part of the cores, less what computes meanwhile.
        ema: keep an average of the weights, of which each step keeps this share, such as 0.999 (`ElixirOptimizer`).
        replan: compare the first steps with the plan, and move chunks once if a better one is found.
        verbose: print the plan on rank 0. None prints its summary to standard error if no logging is set up; if it is,
            the summary is logged.
        compile: give each layer that the model repeats to torch.compile, with these arguments if it is a dict. Layers
            compiled before stay so without it, those that ``torch.compile(layer)`` has replaced in place. The layers
            stay compiled after `ElixirModule.close`.
        options: fields of `elixir.search.request.SearchRequest`, such as ``device_memory`` or ``accumulation``, and
            further arguments of `ElixirModule`, such as ``weights``. ``moments=None`` keeps them as a `HybridAdam`
            says, otherwise in float32. ``clipping=None`` plans with clipping if `max_norm` is given. With
            ``disk_memory`` give ``disk_folder``, a folder on that disk, which is measured unless `hardware` knows it.
            ``frozen_weights="files"`` leaves frozen weights that do not fit the device in the safetensors of `weights`.
            ``strict=True`` first refuses what a smaller machine would refuse (`elixir.check`), which takes two steps
            on the CPU; ``strict=False`` takes `weights` with other names.

    Returns:
        The wrapped model, and the wrapped optimizer; a list of them where several were given.

    Raises:
        PlanError: nothing fits; says what is needed and what would help.
        TraceError, InputError, InputTypeError: see `trace_step`, `SearchRequest`, `ElixirModule`, `ElixirOptimizer`.
        RankError: another rank could not plan.
    """
    _check_numbers(host_threads, initial_scale, ema)
    with layers_compiled(model, compile, keep=True):
        how = {"plan": plan, "hardware": hardware, "dtype": dtype, "inp": inp, "step_fn": step_fn}
        question = _Question.from_arguments(model, optimizer, {**options, **how, "max_norm": max_norm, "ema": ema})
        made, trace = question.answered(group)
        for_module = dict(question.for_module)
        if question.profile.device_kind == "cpu":
            for_module.setdefault("device", "cpu")
        module = ElixirModule(model, made, group, dtype=None if plan is None else dtype, **for_module)
        try:
            numbers: dict[str, Any] = {"initial_scale": initial_scale, "max_norm": max_norm, "ema": ema}
            wrapped = [
                ElixirOptimizer(module, each, host_threads=host_threads, **numbers) for each in question.optimizers
            ]
            for each in wrapped:
                stepper_of(each).norm.is_shared = len(wrapped) > 1
        except BaseException:
            try:
                module.close()  # nobody else has it, and the model could not be wrapped again
            except ElixirError as error:
                logger.error("the model is given back after an error: %s", error)
            raise
    if engine_of(module).group.rank == 0:
        logger.info("%s", made.summary())
        if verbose:
            print(made)  # noqa: T201 - asked for
        elif verbose is None and not logger.hasHandlers():
            print(made.summary(), file=sys.stderr)  # noqa: T201 - or a plan would be run that nobody has seen
    if replan and plan is None and made.placement == "auto":
        hardware = question.profile if trace is None else question.machine
        engine_of(module).before_forward = _Replanning(module, wrapped[0], trace, hardware)
    return module, (wrapped[0] if isinstance(optimizer, torch.optim.Optimizer) else wrapped)


def dry_run(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], **arguments: Any
) -> Plan:
    """The plan that `wrap` would run with the same arguments; nothing is wrapped, moved or allocated.

    Raises:
        PlanError and others: as `wrap`; of `weights` the names are compared, and no value is read.
    """
    given = bound(wrap, (model, optimizer), arguments)
    _check_numbers(given["host_threads"], given["initial_scale"], given["ema"])
    with layers_compiled(model, given["compile"], keep=False):
        question = _Question.from_arguments(model, optimizer, arguments)
        plan, _ = question.answered(given["group"])
        dtype = None if given["dtype"] is None or given["plan"] is None else parse_dtype(given["dtype"])
        with closing(Group(given["group"])) as ranks, unwrapped_subclasses(model):
            return agree_on_plan(ranks, model, plan, dtype, folders_of(given["disk_folder"]))


def _check_numbers(host_threads: object, initial_scale: float, ema: object) -> None:
    """Refuses what would be refused only once the model is wrapped."""
    check_host_threads(host_threads)
    check_decay(ema)
    LossScale(True, initial_scale, 1)


@dataclass(frozen=True)
class _Question:
    """A model, its optimizers, and everything that was asked of the plan for them."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    plan: Plan | HasPlan | str | os.PathLike[str] | None
    profile: HardwareProfile
    read_host: bool
    """Whether the host budget may be what is free here."""
    step: StepQuestion
    asked: dict[str, Any]
    """Options of the search."""
    clipping: bool
    """Whether the plan counts what clipping takes."""
    for_module: dict[str, Any]
    """Arguments of `ElixirModule`."""
    decay: float | None
    """The share of an average of the weights that each step keeps; None: there is none."""
    checked: bool
    """Whether two steps are taken first where everything is streamed."""

    @classmethod
    def from_arguments(cls, model: nn.Module, optimizer: Any, given: Mapping[str, Any]) -> _Question:
        """Checks the arguments of `wrap`, and tells apart those of the search, of the step and of `ElixirModule`."""
        check_options("argument of wrap", given, option_names())
        optimizers = check_given(model, optimizer)
        plan, hardware = given.get("plan"), given.get("hardware")
        how: dict[str, Any] = {name: given.get(name) for name in ("dtype", "inp", "step_fn")}
        for_module = {name: given[name] for name in _MODULE_OPTIONS if name in given}
        asked = {name: given[name] for name in _OPTIONS if name in given}
        clipping = asked.pop("clipping", None)
        clips = bool(given.get("max_norm")) if clipping is None else clipping
        needless = [name for name, value in asked.items() if value != _OPTIONS[name].default and name != "reserve"]
        needless += [name for name in ("inp", "step_fn") if how[name] is not None]
        if plan is not None and needless:
            raise InputError(
                f"a plan that is given was made with its options; leave out {', '.join(needless)}, or leave out plan="
            )
        if hardware is None and compute_device(given.get("device")).type == "cpu":
            hardware = "cpu"  # this is a run, so what is planned for is where it runs
        step = StepQuestion(model=model, **how, use_fused_kernels=given.get("use_fused_kernels", False))
        strict = for_module.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise InputTypeError(f"strict must be True, False or None, got {strict!r}")
        if strict and plan is not None:
            raise InputError(
                "strict=True takes two steps, and a plan that is given comes without one; leave out one of them, or "
                "run `elixir check`"
            )
        for_module["strict"] = strict is not False
        if plan is None:
            for each in optimizers:
                check_optimizer(each, check_kind(moments_of(each, asked.get("moments"))))
        profile, here = profile_for(hardware), hardware is None
        decay = check_decay(given.get("ema"))
        return cls(model, optimizers, plan, profile, here, step, asked, clips, for_module, decay, bool(strict))

    @cached_property
    def machine(self) -> HardwareProfile:
        """The profile, with the disk that states may go to or frozen weights are on; measured on the rank that asks."""
        folders = folders_of(self.for_module.get("disk_folder"))
        in_files = self.asked.get("frozen_weights") == "files"
        if self.profile.knows_disk or not (in_files or (folders and self.asked.get("disk_memory") is not None)):
            return self.profile
        from elixir.microbench.disk import with_disk  # here, since most runs measure no disk

        if folders:
            return with_disk(self.profile, *folders)
        there = {os.path.dirname(os.path.abspath(path)) for path in safetensors_in(self.for_module.get("weights"))}
        try:
            return with_disk(self.profile, min(there))
        except InputError as error:
            raise InputError(
                f"{error}: to plan with frozen_weights='files', the disk is measured; give disk_folder=, a folder on "
                "that disk, or hardware= of a machine whose disk was measured"
            ) from error

    def answered(self, group: GivenGroup) -> tuple[Plan, StepTrace | None]:
        """Rank 0's plan on every rank, by which the optimizers can step, and the trace on rank 0, which alone may plan
        again."""
        text: str | None = None
        trace: StepTrace | None = None
        with closing(Group(group)) as planning:
            views = self._views(planning)
            with planning.together("plan"):
                if planning.rank == 0:
                    plan, trace = self._make_plan(planning.size, views, planning.of_mesh)
                    text = plan.to_json()
            made = Plan.from_json(planning.exchange("the plan", text)[0])
        if self.plan is not None:  # it may be for something else
            for each in self.optimizers:
                check_optimizer(each, made.moments)
            check_average(self.decay, made.optimizer)
        return made, trace

    def _views(self, planning: Group) -> list[MachineView]:
        """Every rank's view of its machine, if the plan is for what is free there."""
        given = {self.asked.get("device_memory"), self.asked.get("host_budget", self.asked.get("host_memory"))}
        reads = FREE_HERE in given or (None in given and (self.read_host or is_this_machine(self.profile)))
        if planning.size == 1 or self.plan is not None or not reads:
            return []
        with planning.together("read free memory"):
            mine = MachineView.here(compute_device(self.for_module.get("device")))
        return planning.exchange("free memory", mine)

    def _make_plan(
        self, world_size: int, views: list[MachineView], replicas: int | None
    ) -> tuple[Plan, StepTrace | None]:
        if self.for_module.get("weights") is not None:  # before a minute is spent on a trace
            with unwrapped_subclasses(self.model):
                check_weights(self.model, self.for_module["weights"], strict=self.for_module.get("strict", True))
        files: tuple[WeightFile, ...] = ()
        if self.asked.get("frozen_weights") == "files":
            files = weight_records(self.for_module.get("weights"))
        if self.checked:
            from elixir.check import raise_refusals, refusals  # here, with the tracer that most ranks never need

            raise_refusals(
                refusals(
                    self.model,
                    self.optimizers,
                    self.step.inp,
                    self.step.step_fn,
                    dtype=self.step.torch_dtype,
                    moments=self.asked.get("moments"),
                    use_fused_kernels=self.step.use_fused_kernels,
                )
            )
        if self.plan is not None:
            return (Plan.load(self.plan) if isinstance(self.plan, (str, os.PathLike)) else plan_of(self.plan)), None
        named = families_of(self.model, self.optimizers, self.asked.get("moments"))
        stepped_by = named.optimizer_type + self._loop(named.elementwise, named.moments)
        said = unequal(views)
        if said:
            logger.warning("the machines are not alike, and the plan is for the least memory of all: %s", said)
        settled = {
            "world_size": world_size,
            "free": least_free(views) if views else None,
            "optimizer_type": stepped_by if self.decay is None else with_average(stepped_by),
            "matrices": named.matrices,
            "moments": named.moments,
            "clipping": self.clipping,
        }
        if replicas is not None:
            asked, self.asked["replicas"] = self.asked.get("replicas", "auto"), replicas
            if asked not in ("auto", replicas):
                raise InputError(f"replicas={asked!r}, but the device mesh has {replicas}; leave out one of them")
        request = SearchRequest(**{**self.asked, **settled})
        answer = answer_to(self.step, self.machine, request, read_host=self.read_host)
        return replace(answer.plan, weight_files=files), answer.trace

    def _loop(self, optimizers: list[torch.optim.Optimizer], moments: str) -> str:
        """The part of `elixir.optimizer_states.optimizer_name` that says how states are stepped that stay in place."""
        fused = bool(self.step.use_fused_kernels)
        loop = next((each for each in optimizers if copies_states(each, fused_kernels=fused, moments=moments)), None)
        if loop is None:
            return ""
        foreach, for_loop = LOOPS
        return f" ({foreach if loop.param_groups[0].get('foreach') else for_loop})"


class _Replanning:
    """Watches the first steps from the beginnings of forwards, and corrects the plan once."""

    def __init__(
        self, module: ElixirModule, optimizer: ElixirOptimizer, trace: StepTrace | None, hardware: HardwareProfile
    ) -> None:
        self._module, self._optimizer, self._trace, self._hardware = module, optimizer, trace, hardware
        self._reports: list[StepReport] = []
        self._cuda = module.device.type == "cuda"

    def __call__(self) -> bool:
        """Returns whether it still watches."""
        module = self._module
        if not torch.is_grad_enabled():
            return True
        engine = engine_of(module)
        report, before = module.last_report, self._reports[-1] if self._reports else None
        if report is not None and report is not before and report.span is not None:
            self._reports.append(report)
            if self._cuda and len(self._reports) == WARM_UP_STEPS:
                torch.cuda.reset_peak_memory_stats(module.device)
        if len(self._reports) < WARM_UP_STEPS + MEASURED_STEPS:
            return True
        if len(self._reports) > WARM_UP_STEPS + MEASURED_STEPS + MOST_REFUSALS:
            logger.info(
                "the plan stays: gradients of the step before are held at every forward; call zero_grad() before it"
            )
            return False
        answers = engine.exchange("observations", (engine.holds_gradients(), self._observation()))
        if any(holds for holds, _ in answers):
            return True  # between two micro-batches; the next forward asks again
        text: str | None = None
        if self._trace is not None:
            text = self._corrected(self._trace, [seen for _, seen in answers])
        text = engine.exchange("second plan", text)[0]
        if text is None:
            return False
        module.settle()  # the error of a step must not be taken for one of the move
        try:
            module.rehome(Plan.from_json(text))
        except Exception as error:  # a training that runs is not ended by chunks that cannot move
            if engine.phase.closed:
                raise
            logger.warning("the chunks stay where they are, since they could not be moved: %s", error)
        return False

    def _corrected(self, trace: StepTrace, observations: list[Observation]) -> str | None:
        plan = self._module.plan
        try:
            correction = correct(trace, self._hardware, plan, observations, plan.optimizer)
            if correction.plan is not None:
                refuse_compiled(self._module.module, correction.plan, runs=True)
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
            device_peak = max(predicted, last.observed["device_buffers"])
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
            batches=statistics.median_low(report.micro_batches for report in reports) or None,
            early=_early_shares(reports, self._optimizer.max_norm),
        )


def _early_shares(reports: Sequence[StepReport], max_norm: float) -> EarlyShares:
    """How the early updates of these steps went; under a plan without, how they would have gone.

    Args:
        reports: of the steps.
        max_norm: to which the optimizer clips. Where it is 0 and there is a norm, somebody else may have clipped.
    """
    counts = sum((report.early for report in reports), EarlyCounts())
    if counts.planned:
        run = sum(report.host_forms.get(form, 0) for report in reports for form in (ONE_PASS, COPIED))
        return EarlyShares(counts.made / counts.planned, min(run / counts.planned, 1.0), counts.kept / counts.planned)
    unclipped = statistics.fmean(report.grad_norm is None or float(report.grad_norm) <= max_norm for report in reports)
    return EarlyShares(unclipped, unclipped, unclipped)
