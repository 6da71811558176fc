"""The settings with which one machine trains a model fastest: micro-batch, passes, moments, and activations to keep.

Each setting is a variant of one question. A quick look takes the activations that seem best and the fastest plan at the
rates of the machine; the best few are traced and planned as they will run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from torch import nn

from elixir.errors import InputError, PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.optimizer_states import is_adam, optimizer_name, state_size
from elixir.search.advise.activations import trace_that_keeps
from elixir.search.advise.answer import Answer
from elixir.search.advise.infeasible import in_short
from elixir.search.planner import Planning, budgets_of, packing_floors, setting_for
from elixir.search.propose.shortage import lacks_device, live_bytes, room
from elixir.search.propose.variants import WORTHWHILE, fastest
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.searches import with_exact_moves, with_passes_of
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.step_trace import StepTrace

METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora": 16}, "qlora": {"lora": 16, "quantised": "nf4"}}
"""Way to fine-tune a model -> its fields of `StepQuestion`."""
MOST_SAMPLES = 8
"""Largest micro-batch that is chosen where the samples of a step are not given."""
WORTH = 1.05
"""A larger micro-batch, and moments in fewer bits, must give more samples a second by more than this factor."""
SATURATING_TOKENS = 4096
"""Tokens of a micro-batch with which compute is as fast as with more: the rows of its matrix products, of which GPUs
need about a thousand for their full rate."""
FEWER_BITS = "8bit"
SMALL_SHARE = 0.05
"""Moments in fewer bits that save less than this part of a device's budget are not looked at."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The settings that are left open; all others are as asked."""

    micro_batch: Literal["given", "of a step", "any"] = "given"
    """``of a step``: the batch is that of an optimizer step, to be cut into micro-batches that are accumulated;
    ``any``: nobody has said how many samples a step has, and the micro-batch with most samples a second is taken."""
    moments: bool = False
    """Whether Adam's moments may have fewer bits, which changes numbers."""
    activations: bool = True
    """Whether each layer's activations are chosen, if the model repeats layers that can run again."""
    exact: bool = True
    """Whether the best few are traced as they will run; otherwise what is predicted counts."""


class Traced(Protocol):
    """Gives models and traces, each made once."""

    def built(self, step: StepQuestion) -> nn.Module:
        """The model of a step."""

    def asked(self, step: StepQuestion, hardware: HardwareProfile) -> StepTrace:
        """The step as it is."""

    def whole(self, step: StepQuestion, hardware: HardwareProfile) -> StepTrace:
        """The step with layers that keep everything."""


@dataclass(eq=False)
class _Way:
    """One setting, looked at closer and closer. Seconds are those of a sample, infinite where nothing fits."""

    step: StepQuestion
    hardware: HardwareProfile
    request: SearchRequest
    traced: Traced
    exact: bool
    seconds: float = math.inf
    """The first look's."""
    compute_bound: bool = False
    """Whether a larger micro-batch would take as long for each sample."""
    answer: Answer | None = None
    missed: tuple[PlanError, Question] | None = None

    @cached_property
    def predicted(self) -> Question:
        """The question with the activations that seem best."""
        return self._question(exact=False)

    def _question(self, *, exact: bool) -> Question:
        whole = self._whole
        if self.request.activations is None or self._keeps_all:
            return whole
        built = self.traced.built(self.step)
        trace = trace_that_keeps(self.step, self.hardware, self.request, built, whole.trace, exact=exact)
        return whole._replace(trace=trace)

    @cached_property
    def _keeps_all(self) -> bool:
        """Whether no step can be faster than one that keeps everything, since compute alone takes as long."""
        compute_s = self.request.accumulation * _compute_s(self._whole)
        floors = packing_floors(self._whole) if self.request.pass_size == 1 else ()
        return any(floor_s <= WORTHWHILE * compute_s for floor_s, _ in floors)

    @cached_property
    def _whole(self) -> Question:
        """The question with all that layers keep, if activations are chosen."""
        made = self.traced.asked if self.request.activations is None else self.traced.whole
        return Question(made(self.step, self.hardware), self.hardware, replace(self.request, activations=None))

    @property
    def samples(self) -> int:
        """Samples of a rank and optimizer step."""
        return (self.predicted.trace.step.samples or self.step.batch) * self.request.accumulation

    def look(self) -> None:
        """Finds the fastest plan of the predicted step at the rates of the machine."""
        try:
            # Before activations are chosen, which takes longer.
            check_room(self._whole, keeps_all=self.request.activations is None)
        except PlanError as error:
            self.missed = error, self._whole
            return
        plan = self.planning.plan
        if plan is not None:
            saturated = (plan.step.tokens or 0) >= SATURATING_TOKENS
            self.compute_bound = saturated and plan.predicted.seconds["compute"] * WORTH >= plan.predicted.step_s
            self.seconds = plan.predicted.step_s / self.samples

    @cached_property
    def planning(self) -> Planning:
        """All that is found out for the predicted question: in short if another is planned in the end."""
        return Planning(self.predicted.nominal, briefly=True) if self.exact else Planning(self.predicted)

    def exact_s(self) -> float:
        """Seconds of the fastest step that its plan knows, traced as it will run."""
        if self.missed is not None:
            return math.inf
        question, step = self.predicted, self.step
        own = question.trace.step.activations if self.exact and self.seconds < math.inf else ()
        if own:
            step = replace(step, activations=own)
            question = question._replace(trace=step.trace(self.hardware, self.traced.built(step)))
            if not packing_floors(question):  # what was predicted is a little too low
                return math.inf
        return self._planned_s(question)

    def slow_s(self) -> float:
        """Seconds with the best of many choices of activations, all traced as they will run."""
        return math.inf if self.seconds == math.inf else self._planned_s(self._question(exact=True))

    def _planned_s(self, question: Question) -> float:
        try:
            self._plan(question, None if self.exact else self.planning)
        except PlanError as error:
            self.missed = error, question
            return math.inf
        assert self.answer is not None
        predicted = self.answer.plan.predicted
        return (predicted.fastest_s or predicted.step_s) / self.samples

    def _plan(self, question: Question, planning: Planning | None = None) -> None:
        answer = Answer((planning or Planning(question)).plan_or_shortage(), question)
        self.answer = with_exact_moves(answer, self.step, self.traced.built(self.step))

    def may_gain_by_fewer_bits(self) -> bool:
        """Whether moments in fewer bits may shorten the step."""
        if self.seconds == math.inf:
            return True
        numels = [each.numel for each in self.predicted.trace.parameters if each.trainable]
        kept, fewer = (
            sum(map(state_size(self.request.optimizer_type, kind).nbytes, numels)) for kind in ("float32", FEWER_BITS)
        )
        return kept - fewer > SMALL_SHARE * budgets_of(self.predicted).device_bytes


def best_settings(
    step: StepQuestion, hardware: HardwareProfile, request: SearchRequest, traced: Traced, choices: Choices
) -> Answer:
    """The fastest answer among all settings that are open; of those about as fast, float32 moments, then the smallest
    micro-batch.

    Raises:
        PlanError: no setting fits; says what is missing, and what suffices.
    """
    if choices.activations and request.activations is None and step.checkpoint == "none":
        try:
            chosen = replace(request, activations="auto")
            return best_settings(step, hardware, chosen, traced, replace(choices, activations=False))
        except InputError:  # no layer repeats, or the model's code has checkpoints
            return best_settings(step, hardware, request, traced, replace(choices, activations=False))
    kinds = ["float32"] if request.moments == "float32" else [request.moments]
    if choices.moments and kinds == ["float32"] and is_adam(optimizer_name(request.optimizer_type)):
        kinds.append(FEWER_BITS)
    ways = list[_Way]()
    for kind in kinds:
        if not ways or any(way.may_gain_by_fewer_bits() for way in ways):
            asked = replace(request, moments=kind)
            cuts = _cuts(step, asked, traced, choices)
            ways += _climbed([_Way(of, hardware, how, traced, choices.exact) for of, how in cut] for cut in cuts)
    for last in (_Way.exact_s, _Way.slow_s):
        best = fastest(ways, (lambda way: way.seconds, last), WORTH)
        if best is not None and best.answer is not None:
            return best.answer
    missed = [way.missed for way in ways if way.missed is not None]
    raise in_short(*min(missed, key=lambda each: each[0].needed_bytes - each[0].available_bytes))


def _compute_s(question: Question) -> float:
    """Seconds of the compute of a micro-batch."""
    trace, hardware, ranks = question.trace, question.hardware, question.request.world_size
    rates = Rates(hardware, main_dtype(trace), ranks, hardware.ranks_per_host(ranks))
    return float(rates.accesses_s(trace).sum())


def _cuts(
    step: StepQuestion, request: SearchRequest, traced: Traced, choices: Choices
) -> Iterator[list[tuple[StepQuestion, SearchRequest]]]:
    """The steps and requests of each micro-batch to look at, the smallest first: micro-batches one by one, and all in a
    pass."""
    if choices.micro_batch == "given":
        yield [(step, request)]
        return
    most = step.batch if choices.micro_batch == "of a step" else MOST_SAMPLES
    sizes = [most]
    while not sizes[-1] % 2:
        sizes.append(sizes[-1] // 2)
    for size in reversed(sizes):
        count = most // size if choices.micro_batch == "of a step" else 1
        # "auto" is made 1 for a model that cannot take passes.
        together = with_passes_of(traced.built(step), replace(request, accumulation=count, pass_size="auto"))
        passes = (1, count) if count > 1 and together.pass_size == "auto" else (1,)
        yield [(replace(step, batch=size), replace(together, pass_size=each)) for each in passes]


def _climbed(cuts: Iterator[list[_Way]]) -> Iterator[_Way]:
    """The ways that are looked at: from the smallest micro-batch for as long as larger ones pay."""
    least_s = math.inf
    for ways in cuts:
        for way in ways:
            way.look()
            yield way
        seconds = min(way.seconds for way in ways)
        if any(way.compute_bound for way in ways) or WORTH * seconds >= least_s:
            return
        least_s = seconds


def check_room(question: Question, *, keeps_all: bool = True) -> None:
    """Refuses what cannot fit however it is placed, before a search that would take seconds to say so.

    Args:
        question: as asked.
        keeps_all: the activations of the step are those of its trace; otherwise fewer may be kept.

    Raises:
        PlanError: it cannot fit.
    """
    trace, budgets = question.trace, budgets_of(question)
    needed, there = room(trace, setting_for(question), budgets)
    short_of_device = keeps_all and lacks_device(trace, budgets) > 0
    if needed > there:
        raise PlanError(
            f"{trace.model_name}: weights and optimizer states exceed device and host memory"
            f"{', and the disk,' if budgets.disk_bytes else ''} together"
            f"{', and activations, inputs and buffers the device' if short_of_device else ''}",
            needed_bytes=needed,
            available_bytes=there,
        )
    if short_of_device:
        raise PlanError(
            f"{trace.model_name}: activations, inputs and buffers alone exceed the device memory, wherever weights are",
            needed_bytes=live_bytes(trace),
            available_bytes=budgets.device_bytes,
        )
