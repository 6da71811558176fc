"""`Answer`: a plan, and the question that it answers; `evaluate` asks the question again with a `Change`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elixir.errors import InputError, PlanError, TraceError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.plan.process_need import ProcessNeed, must_be_free_bytes, planned_need
from elixir.search.advise.changes import Change, Kind, better_machine, for_speed, larger_batches, with_less
from elixir.search.planner import lacks_memory, packing_floors, planned
from elixir.search.propose.judge import TIE
from elixir.search.question import Question
from elixir.search.request import SearchRequest
from elixir.search.simulator.replay import RESOURCES
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.units import format_seconds

ALLOWED: tuple[Kind, ...] = ("moments", "kernels", "accumulation", "checkpointing")
"""Kinds of changes that a user may allow: they change numerics, or what a step is."""


@dataclass(frozen=True)
class Effect:
    """A change, and the plan that it gives."""

    change: Change
    plan: Plan | None
    """None where nothing fits with it."""
    step_s: float | None
    """Seconds of the step with it; None likewise, as in the next two. Of a lever of the training: those of the fastest
    plan, and what a safe one takes longer, as the plan as it is does."""
    change_s: float | None
    """Negative where the step gets shorter."""
    gain: float | None
    """Samples a second over those of the plan as it is."""
    busiest: str | None = None
    """The resource that works longest in the step, such as ``compute`` or ``host_adam``."""

    def __repr__(self) -> str:
        if self.step_s is None:
            return f"<Effect: {self.action}: does not fit>"
        gain = "" if self.gain is None else f", {self.gain:.2f} x the samples a second"
        return f"<Effect: {self.action}: {format_seconds(self.step_s)} a step{gain}>"

    @property
    def action(self) -> str:
        """The thing to do."""
        return self.change.action

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Arguments that do it, with their values; a switch has none."""
        return self.change.options


@dataclass(frozen=True, eq=False)
class Answer:
    """The outcome of a search. It can be used wherever a plan can, and has all attributes of its plan.

    It equals its plan. `save` and `to_json` write the plan alone: what else an answer knows is not in the file.
    """

    plan: Plan
    question: Question = field(repr=False)

    @classmethod
    def of(cls, plan: Plan | HasPlan, trace: StepTrace, hardware: HardwareProfile) -> Answer:
        """The answer that a plan from a file is, asked for this machine."""
        plan = plan_of(plan)
        judged = [each.scenario.clipped for each in plan.predicted.judgements]
        # Every plan in float16 reads the norm, for overflow; only its scenarios tell whether the run clips.
        overflow_only = trace.dtype == "float16" and judged and not any(judged)
        request = SearchRequest(
            world_size=plan.world_size,
            optimizer_type=plan.optimizer,
            matrices=plan.matrices or None,
            overlap=plan.overlap,
            device_memory=plan.device_budget_bytes,
            host_budget=plan.host_budget_bytes,
            disk_memory=plan.disk_budget_bytes if hardware.knows_disk else None,
            placement=plan.placement,
            accumulation=plan.accumulation,
            pass_size=plan.pass_size,
            moments=plan.moments,
            frozen_weights=plan.frozen_weights,
            early_updates=plan.may_update_early,
            clipping=plan.clipping and not overflow_only,
            assume=plan.assume,
            replicas=plan.replicas,
            reserve=plan.reserve_bytes or None,
        )
        return cls(plan, Question(trace, hardware, request))

    @property
    def trace(self) -> StepTrace:
        """The step that was planned."""
        return self.question.trace

    @property
    def process_need(self) -> ProcessNeed:
        """The host memory of one process at its peak."""
        return planned_need(self.plan, self.question.hardware)

    @property
    def must_be_free_bytes(self) -> int:
        """The memory of each machine that must be free for a run, that of all its processes."""
        return must_be_free_bytes(self.plan, self.question.hardware)

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks together; micro-batches where samples are not known."""
        plan = self.plan
        return (plan.step.samples or 1) * plan.accumulation * plan.world_size / plan.predicted.step_s

    def levers(self) -> tuple[Effect, ...]:
        """The step with one thing changed, planned again: moments in fewer bits, fused kernels, more samples a step,
        other activation checkpointing; the most samples a second first, then what is as fast with less memory, and last
        what does not fit.

        What takes another trace is there for models that are known by name. Passes are as large as those of the plan,
        or have all micro-batches. All plans are the fastest at the rates of the machine, as the seconds are that they
        are compared with: of both, safe plans are slower by about as much.
        """
        question = self.question._replace(request=replace(self.question.request, pass_size=self.plan.pass_size))
        found = [self._first([change], question) for change in for_speed(question)]
        if larger := larger_batches(question):
            found.append(self._first(larger, question))
        found.sort(key=lambda row: (-(row.gain or 0.0), row.action))
        as_fast = (1 + TIE) * (self.plan.predicted.fastest_s or self.plan.predicted.step_s)
        less = [self._first(each, question, as_fast) for each in with_less(self.plan, question) if each]
        fitting = [[row for row in rows if row.plan is not None] for rows in (found, less)]
        return (*fitting[0], *fitting[1], *(row for row in found if row.plan is None))

    def _first(self, changes: Sequence[Change], question: Question, most_s: float = math.inf) -> Effect:
        """The first of the changes with a plan that takes no longer; the last, without a plan, if there is none."""
        size = self.plan.block_bytes or max(chunk.weight_bytes for chunk in self.plan.chunks)
        answers = ((change, evaluate(change, question, briefly=True, most_s=most_s, size=size)) for change in changes)
        return self._effect(*next((each for each in answers if each[1] is not None), (changes[-1], None)))

    def _effect(self, change: Change, other: Answer | None) -> Effect:
        if other is None:
            return Effect(change, None, None, None, None)
        predicted = self.plan.predicted
        safe = predicted.step_s / (predicted.fastest_s or predicted.step_s)
        step_s = safe * other.plan.predicted.step_s
        gain = other.samples_per_s / (safe * self.samples_per_s)
        seconds = other.plan.predicted.seconds
        busiest = max(RESOURCES, key=lambda name: seconds.get(name, 0.0))
        return Effect(change, other.plan, step_s, step_s - predicted.step_s, gain, busiest)

    def machine_levers(self, progress: Callable[[str, int, int], None] | None = None) -> tuple[Effect, ...]:
        """The step planned again as things are, and with twice each part of the machine; the shortest first.

        A lever never makes the step longer: the plan as it is remains a choice.

        Args:
            progress: is called before each lever.
        """
        plan, trace, hardware = self.plan, self.trace, self.question.hardware
        now_s = simulate_step(plan, trace, hardware).step_s
        changes, found = list(better_machine(plan, self.question)), []
        for done, change in enumerate(changes):
            if progress is not None:
                progress(change.action, done, len(changes))
            other = evaluate(change, self.question)
            possible_s = [now_s] if other is None else [now_s, other.plan.predicted.step_s]
            if change.hardware is not None:
                possible_s.append(simulate_step(plan, trace, change.hardware).step_s)
            step_s = min(possible_s)
            found.append(Effect(change, None if other is None else other.plan, step_s, step_s - now_s, now_s / step_s))
        return tuple(sorted(found, key=lambda row: (row.change_s, row.action)))

    def __eq__(self, other: object) -> bool:
        return self.plan == (other.plan if isinstance(other, Answer) else other)

    def __str__(self) -> str:
        return str(self.plan)

    def __repr__(self) -> str:
        return f"<Answer: {self.plan!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` ask for such before there is a plan
            raise AttributeError(name)
        return getattr(self.plan, name)


def evaluate(
    change: Change, question: Question, *, briefly: bool = False, most_s: float = math.inf, size: int = 0
) -> Answer | None:
    """The answer to the question with the change; None where nothing fits, or it cannot be asked.

    Args:
        change: what is done differently.
        question: as asked.
        briefly: as for `planned`.
        most_s: None, too, if a step would take longer; no plan is made if the floor says so.
        size: of the chunks that the floor is for.
    """
    try:
        if lacks_memory(Change((), change.action, request=change.request).applied(question)):
            return None  # nothing that another trace shows could change that
        asked = change.applied(question)
        may_win = most_s == math.inf or any(floor_s <= most_s for floor_s, _ in packing_floors(asked, (size,)))
        plan = planned(asked, briefly=briefly) if may_win else None
    except (InputError, PlanError, TraceError):
        return None
    return None if plan is None or plan.predicted.step_s > most_s else Answer(plan, asked)


def best_allowed(question: Question, kinds: Collection[str]) -> tuple[Question, tuple[Change, ...]]:
    """The question with the allowed changes that give most samples a second, chosen one after the other, and these.

    Args:
        question: as asked.
        kinds: of `ALLOWED`.

    Raises:
        InputError: a kind is unknown.
    """
    unknown = [kind for kind in kinds if kind not in ALLOWED]
    if unknown:
        raise InputError(f"{unknown[0]!r} cannot be allowed; expected some of {', '.join(ALLOWED)}")
    taken: list[Change] = []
    plan = planned(question, briefly=True)
    speed = 0.0 if plan is None else Answer(plan, question).samples_per_s
    for kind in ALLOWED:
        asked = [change for change in for_speed(question) if kind in kinds and change.kinds == (kind,)]
        found = [(change, evaluate(change, question, briefly=True)) for change in asked]
        better = [(answer.samples_per_s, change, answer) for change, answer in found if answer is not None]
        best = max(better, key=lambda each: each[0], default=None)
        if best is not None and best[0] > speed:
            speed, question = best[0], best[2].question
            taken.append(best[1])
    return question, tuple(taken)
