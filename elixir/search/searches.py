"""The three searches as users call them: a model (traced here) or a `StepTrace`, in; an `Answer`, with the plan,
out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError, PlanError, TraceError
from elixir.hardware.profile import (
    HardwareProfile,
    load_hardware,
    preset,
    preset_names,
    warn_if_doubtful,
    warn_if_other_device,
)
from elixir.search.advise.activations import trace_that_keeps
from elixir.search.advise.answer import Answer
from elixir.search.advise.infeasible import with_levers
from elixir.search.budgets import host_memory_here, on_rank_0, warn_if_disk_full
from elixir.search.planner import plan_or_shortage, simple_plan
from elixir.search.question import Question, StepQuestion
from elixir.search.request import OPTIONS, SearchRequest, bound, options_of, takes
from elixir.step_trace import StepTrace

logger = logging.getLogger(__name__)

DEFAULT_HARDWARE = "h200"
"""Machine planned for where none is named and no known GPU is found here."""


def plan_from_trace(trace: StepTrace, hardware: HardwareProfile, asked: SearchRequest | int, **options: Any) -> Answer:
    """Finds the plan within the budgets that loses least in the scenarios of the profile, the same in every process.

    Args:
        trace: what one step of one rank needs.
        hardware: the machine, by whose rates candidates are compared.
        asked: a request, or the number of ranks.
        options: fields of `SearchRequest`, such as ``device_memory="80GiB"``.

    Raises:
        InputError, InputTypeError: an argument makes no sense, or the machine's
            disk is unknown and `disk_memory` is given.
        PlanError: nothing fits; carries what would, and what to change.
    """
    if not isinstance(trace, StepTrace):
        raise InputTypeError(f"trace must be a StepTrace, got {type(trace).__name__}")
    if not isinstance(hardware, HardwareProfile):
        raise InputTypeError(f"hardware must be a HardwareProfile, such as preset('h200'), got {hardware!r}")
    return _answer(StepQuestion(model=trace), hardware, SearchRequest.of(asked, **options))


def _answer(step: StepQuestion, hardware: HardwareProfile, request: SearchRequest) -> Answer:
    """The answer for a model or a trace, with activations that are chosen for it."""
    if request.activations == "auto":
        trace = trace_that_keeps(step, hardware, request)
        request = dataclasses.replace(request, activations=None)
    else:
        trace = step.trace(hardware)
    return with_exact_moves(_answered(trace, hardware, request), step)


def _answered(trace: StepTrace, hardware: HardwareProfile, request: SearchRequest, *, moves: bool = True) -> Answer:
    question = Question(trace, hardware, _without_training(request, trace))
    try:
        plan = plan_or_shortage(question, moves=moves)
    except PlanError as error:
        raise with_levers(error, question._replace(request=question.request.in_replicas(1))) from None
    return Answer(plan, question._replace(request=question.request.in_replicas(plan.replicas)))


def _without_training(request: SearchRequest, trace: StepTrace) -> SearchRequest:
    """The request, without an optimizer if the step that was traced trains nothing.

    Raises:
        InputError: it has no optimizer, but the step trains.
    """
    if trace.step.forward:
        return dataclasses.replace(request, optimizer_type=None, moments="float32")
    if request.optimizer_type is None and any(param.trainable for param in trace.parameters):
        raise InputError(
            "optimizer_type=None plans for a step that trains nothing, but a training step was traced; give the model "
            "instead of the trace, or trace it with `elixir profile --forward`"
        )
    return request


def answer_to(step: StepQuestion, profile: HardwareProfile, request: SearchRequest, *, read_host: bool) -> Answer:
    """The answer to `request` for this step; doubts about the machine are logged.

    Args:
        step: the step.
        profile: the machine.
        request: what is asked of the plan.
        read_host: the host budget may be what is free here, where the profile knows none.
    """
    warn_if_other_device(profile)
    warn_if_doubtful(profile)
    warn_if_disk_full(profile, request.disk_memory)
    request.divisions(1)  # refuses before a trace is made
    if isinstance(step.model, nn.Module):
        request = with_passes_of(step.model, request)
    if read_host and not request.gives_host:
        request = dataclasses.replace(request, host_memory=host_memory_here(profile))
    return _checked(_answer(step, profile, request), step)


def with_passes_of(model: nn.Module, request: SearchRequest) -> SearchRequest:
    """The request, which chooses no passes of several micro-batches for a model that cannot take them.

    Raises:
        InputError: it asks for such passes.
    """
    from elixir.models.plannable import refuse_passes

    try:
        if request.pass_size != 1:
            refuse_passes(model)
    except InputError as error:
        if request.pass_size != "auto":
            raise
        logger.info("micro-batches go one by one: %s", error)
        return dataclasses.replace(request, pass_size=1)
    return request


def with_exact_moves(answer: Answer, step: StepQuestion, built: nn.Module | None = None) -> Answer:
    """The answer with the bytes of a trace in which layers move their inputs, if the search has chosen that; without
    moves, if they do not: a layer may be called with keywords alone. A trace that cannot be made again is believed.

    Args:
        answer: of a search.
        step: of a model, or a trace of one.
        built: the model, where it was built before.
    """
    plan, (trace, hardware, request) = answer.plan, answer.question
    if not plan.step.swap_bytes or trace.step.swap_bytes:
        return answer
    if isinstance(step.model, StepTrace):
        if trace.step.checkpoint is None:
            return answer
        step = StepQuestion.again(trace)
    chosen = tuple(dataclasses.replace(each, swap_bytes=0) for each in plan.step.activations)
    try:
        moving = dataclasses.replace(step, activations=chosen).trace(hardware, built)
        if 2 * moving.step.swap_bytes * plan.pass_size > plan.step.swap_bytes:
            return _answered(moving, hardware, dataclasses.replace(request, pass_size=plan.pass_size))
        logger.info("inputs of layers stay on the device: they are called in a way in which none would move")
    except (InputError, TraceError, PlanError) as error:
        logger.info("inputs of layers stay on the device: that they would move as predicted is not known: %s", error)
    return _answered(trace, hardware, request, moves=False)


def _checked(answer: Answer, step: StepQuestion) -> Answer:
    """The answer, if the model can run under its plan."""
    if isinstance(step.model, nn.Module):
        from elixir.models.layer_units import layers_compiled
        from elixir.models.plannable import refuse_compiled

        with layers_compiled(step.model, step.compile, keep=False):
            refuse_compiled(step.model, answer.plan)
    return answer


_ORDER = (
    "model", "world_size", "split_number", "allocate_factor", "unified_dtype", "shard_device", "optimizer_type",
    "overlap", "verbose", "inp", "step_fn", "hardware", "device_memory", "host_memory", "placement",
    "use_fused_kernels",
)  # fmt: skip
"""Names of the parameters that may be given by position. Further ones come after these, in the order of
`SearchRequest`."""


def _parameters(*own: Parameter, without: tuple[str, ...] = ()) -> list[Parameter]:
    """Parameters of a search: the model, its own, and all options but some."""
    model = Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation="nn.Module | StepTrace")
    named = {parameter.name: parameter for parameter in (model, *own, *_HOW)}
    named |= options_of(SearchRequest, without=("search", "free", *without))
    named["generate"] = _own("generate", None, "tuple[int, int] | None")  # last, so that positions stay
    return [named[name] for name in dict.fromkeys((*_ORDER, *named)) if name in named]


def _own(name: str, default: Any, annotation: str) -> Parameter:
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


_HOW = (
    _own("unified_dtype", None, "str | torch.dtype | None"),
    _own("verbose", False, "bool"),
    _own("inp", None, "Any"),
    _own("step_fn", None, "StepFn | None"),
    _own("hardware", None, "HardwareProfile | str | None"),
    _own("use_fused_kernels", False, "bool | Mapping[str, str]"),
)
"""Parameters of every search that are no options of one: the step, and the machine."""
_ORIGINAL = {"m": "model", "group_size": "world_size", "prefetch": "overlap"}
"""Keywords of the first Elixir's searches -> the same ones here."""


def _bound(function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """`bound`, by the keywords of the first Elixir as well: ``cpu_offload=True`` is ``placement="cpu"``."""
    renamed = dict(options)
    for name in [name for name in (*_ORIGINAL, "cpu_offload") if name in options]:
        value, now = renamed.pop(name), _ORIGINAL.get(name, "placement")
        if name == "cpu_offload":
            value = "cpu" if value else "auto"
        if now in renamed:
            raise InputTypeError(f"{function.__name__}: {name} is the first Elixir's word for {now}; give one of them")
        renamed[now] = value
    if isinstance(renamed.get("shard_device"), torch.device):
        renamed["shard_device"] = renamed["shard_device"].type
    return bound(function, given, renamed)


@takes(_parameters())
def optimal_search(*given: Any, **options: Any) -> Answer:
    """Finds chunk size, packing, rCache blocks and homes that fit the budgets and lose least in all scenarios.

    With ``assume="nominal"`` it finds the fastest step at the profile's rates.

    Args:
        model: what is trained, real or on meta; or a trace of its step.
        world_size: number of ranks, one device each.
        unified_dtype, inp, step_fn, use_fused_kernels, generate: the step, see
            `elixir.search.question.StepQuestion`.
        verbose: print the plan, on rank 0.
        hardware: a profile, or the name of a preset. None takes the GPU found here, for a trace the machine it was made
            for, and otherwise `DEFAULT_HARDWARE`, whose rates also stand for those of a GPU that no preset knows.

    All others are fields of `elixir.search.request.SearchRequest`, which says what they mean. The first Elixir's ``m``,
    ``group_size``, ``prefetch`` and ``cpu_offload`` are taken for ``model``, ``world_size``, ``overlap`` and
    ``placement``.

    Raises:
        InputError, InputTypeError: an argument makes no sense.
        TraceError: the step cannot be traced.
        PlanError: nothing fits; carries what would, and what to change.
    """
    return _searched(search="optimal", **_bound(optimal_search, given, options))


@takes(_parameters(without=("accumulation",)))
def minimum_waste_search(*given: Any, **options: Any) -> Answer:
    """Searches as `optimal_search` does, but for the one chunk size that pads least."""
    return _searched(search="minimum_waste", **_bound(minimum_waste_search, given, options))


@takes(
    _parameters(
        _own("split_number", 10, "int"),
        _own("allocate_factor", 0.6, "float"),
        _own("shard_device", "cuda", "Literal['cuda', 'cpu']"),
        without=(
            "accumulation",
            "pass_size",
            "chunks_of",
            "disk_memory",
            "device_reserve",
            "host_reserve",
            "reserve",
        ),
    )
)
def simple_search(*given: Any, **options: Any) -> Answer:
    """A plan by hand, without a search: for tests, and for people who know what they want.

    Args:
        split_number: about so many chunks; fewer where the largest parameter needs larger ones.
        allocate_factor: share of the streamed chunks that have an rCache block, above 0 and at most 1.
        shard_device: home of all weights and states, unless `placement` says otherwise. With one rank ``cuda`` makes
            every chunk resident, so that nothing is streamed.

    The other arguments are those of `optimal_search`; a budget is checked only where it is given.
    """
    asked = _bound(simple_search, given, options)
    by_hand = {name: asked.pop(name) for name in ("split_number", "allocate_factor", "shard_device")}
    step, profile, request = _question(asked)
    trace = step.trace(profile)
    request = _without_training(request, trace)
    answer = Answer(simple_plan(trace, profile, request, **by_hand), Question(trace, profile, request))
    return _reported(_checked(answer, step), verbose=asked["verbose"])


def _searched(**asked: Any) -> Answer:
    answer = answer_to(*_question(asked), read_host=asked["hardware"] is None)
    return _reported(answer, verbose=asked["verbose"])


def _question(asked: Mapping[str, Any]) -> tuple[StepQuestion, HardwareProfile, SearchRequest]:
    model = asked["model"]
    if not isinstance(model, (nn.Module, StepTrace)):
        raise InputTypeError(f"model must be an nn.Module or a StepTrace, got {type(model).__name__}")
    request = SearchRequest(**{name: value for name, value in asked.items() if name in OPTIONS})
    same = {name: asked[name] for name in ("model", "inp", "step_fn", "use_fused_kernels", "generate")}
    step = StepQuestion(**same, dtype=asked["unified_dtype"], forward=request.optimizer_type is None)
    return step, profile_for(asked["hardware"], model), request


def _reported(answer: Answer, *, verbose: bool) -> Answer:
    logger.debug("%s", answer)
    if verbose and on_rank_0():
        print(answer)  # noqa: T201 - verbose=True asks for it
    return answer


def profile_for(hardware: HardwareProfile | str | None, model: nn.Module | StepTrace | None = None) -> HardwareProfile:
    """The machine that is meant: as given, by a preset's name or a file's, that of a trace, or else the one found
    here."""
    if isinstance(hardware, HardwareProfile):
        return hardware
    if isinstance(hardware, str):
        return load_hardware(hardware)
    if hardware is not None:
        raise InputTypeError(f"hardware is a HardwareProfile or a preset's name, got {type(hardware).__name__}")
    if isinstance(model, StepTrace) and model.device in preset_names():
        return preset(model.device)
    if torch.cuda.is_available():
        found = torch.cuda.get_device_name()
        for name in preset_names():
            profile = preset(name)
            if profile.device_name == found:
                return profile
        logger.warning(
            "no preset for %r: planning with its memory and the rates of %s; measure it with "
            "`elixir hardware --measure --out hw.json` and pass hardware='hw.json'",
            found,
            DEFAULT_HARDWARE,
        )
        return _with_memory_of(found)
    logger.log(
        logging.WARNING if on_rank_0() else logging.DEBUG,
        "no hardware given, and no GPU found here: planning for %s (hardware=, --hardware)",
        DEFAULT_HARDWARE,
    )
    return preset(DEFAULT_HARDWARE)


def _with_memory_of(device_name: str) -> HardwareProfile:
    """`DEFAULT_HARDWARE` with what the driver says of the GPU at hand: a plan for more memory than it has would not
    run."""
    return dataclasses.replace(
        preset(DEFAULT_HARDWARE),
        name=f"rates-of-{DEFAULT_HARDWARE}",
        device_name=device_name,
        compute_capability=torch.cuda.get_device_capability(),
        device_memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        devices_per_host=torch.cuda.device_count(),
    )
