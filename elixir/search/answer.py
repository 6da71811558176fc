"""`Answer`: a plan, and the question that it answers, so that more can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elixir.errors import PlanError
from elixir.hardware import HardwareProfile
from elixir.plan import Plan
from elixir.search.advice import PlanLever, plan_levers, with_what_suffices
from elixir.search.planner import PlannerTries, budgets_of, plan_or_shortage
from elixir.search.request import Question, SearchRequest
from elixir.step_trace import StepTrace


@dataclass(frozen=True, eq=False)
class Answer:
    """The outcome of a search. It can be used wherever a plan can, and has all attributes of its plan.

    It equals its plan. `save` and `to_json` write the plan alone: what else an answer knows is not in the file.
    """

    plan: Plan
    question: Question

    @property
    def trace(self) -> StepTrace:
        """The step that was planned."""
        return self.question.trace

    def levers(self) -> tuple[PlanLever, ...]:
        """The step with one thing changed, planned again: moments in fewer bits, fused kernels, accumulation, other
        activation checkpointing, steps in backward; the most samples a second first.

        What takes another trace is there for models that are known by name.
        """
        asked = self.question
        return plan_levers(self.plan, asked.trace, asked.hardware, asked.request, PlannerTries(asked.hardware))

    def __eq__(self, other: object) -> bool:
        return self.plan == (other.plan if isinstance(other, Answer) else other)

    def __str__(self) -> str:
        return str(self.plan)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` ask for such before there is a plan
            raise AttributeError(name)
        return getattr(self.plan, name)


def plan_from_trace(trace: StepTrace, hardware: HardwareProfile, asked: SearchRequest | int, **options: Any) -> Answer:
    """The fastest plan within the budgets, by the time model; the same plan in every process.

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
    request = SearchRequest.of(asked, **options)
    try:
        plan = plan_or_shortage(trace, hardware, request, others_tried=True)
    except PlanError as error:
        budgets, tries = budgets_of(hardware, request), PlannerTries(hardware)
        raise with_what_suffices(error, trace, hardware, request, budgets, tries) from None
    return Answer(plan, Question(trace, hardware, request))
