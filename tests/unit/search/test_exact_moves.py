"""A plan whose layers move their inputs is made again from a trace in which they do, and without moves if they do not."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from elixir.errors import TraceError
from elixir.search.advise.answer import Answer
from elixir.search.planner import plan_or_shortage
from elixir.search.problem.activation_trace import with_inputs_on_host
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.searches import with_exact_moves
from elixir.step_trace import StepTrace
from tests.common.situations import situation


@pytest.fixture
def answer() -> Answer:
    """Several micro-batches pass layers that move their inputs."""
    trace, machine, options = situation("layers 133")
    trace = replace(trace, step=replace(trace.step, checkpoint="non-reentrant"))
    options["pass_size"] = "auto"
    question = Question(trace, machine, SearchRequest.of(options.pop("asked"), **options))
    found = Answer(plan_or_shortage(question), question)
    assert found.plan.step.swap_bytes > 0 == trace.step.swap_bytes
    assert found.plan.pass_size > 1
    return found


def moving(answer: Answer) -> StepTrace:
    """The step in which the same layers move their inputs."""
    return with_inputs_on_host(answer.trace, tuple(each.unit for each in answer.plan.step.activations if each.swap))


def exact(answer: Answer, found: StepTrace | Exception, step: StepQuestion | None = None) -> tuple[Answer, list[Any]]:
    """The answer with exact moves where the step is traced as `found`, and how it was traced."""
    asked: list[Any] = []

    def traced(question: StepQuestion, hardware: Any, built: Any = None) -> StepTrace:
        asked.append((question, hardware, built))
        if isinstance(found, Exception):
            raise found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepQuestion, "trace", traced)
        return with_exact_moves(answer, step or StepQuestion(model=answer.trace), "mine"), asked  # type: ignore[arg-type]


def test_inputs_that_move_are_planned_with_their_bytes(answer: Answer) -> None:
    whole = moving(answer)
    made, ((step, hardware, built),) = exact(answer, whole)
    assert made.trace is whole
    assert made.plan.step.swap_bytes == answer.plan.step.swap_bytes == answer.plan.pass_size * whole.step.swap_bytes
    assert made.question.request.pass_size == made.plan.pass_size == answer.plan.pass_size
    assert (hardware, built) == (answer.question.hardware, "mine")
    assert step.model == answer.trace.model_name
    assert [replace(each, swap_bytes=0) for each in answer.plan.step.activations] == list(step.activations)
    model = nn.Linear(1, 1)
    made, ((step, _, _),) = exact(answer, whole, StepQuestion(model=model, seq=5))
    assert (step.model is model, step.seq, made.trace is whole) == (True, 5, True)


@pytest.mark.parametrize("share", [0, 0.5, None])
def test_inputs_that_do_not_move_stay_on_the_device(
    answer: Answer, share: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = moving(answer)
    moved = tuple(replace(each, swap_bytes=int((share or 0) * each.swap_bytes)) for each in whole.step.activations)
    step = replace(whole.step, activations=moved)
    made, asked = exact(answer, TraceError("no") if share is None else replace(whole, step=step))
    assert len(asked) == 1
    assert made.trace is answer.trace
    assert made.plan.step.swap_bytes == 0
    assert made.plan.predicted.step_s > answer.plan.predicted.step_s
    assert "inputs of layers stay on the device" in caplog.text
    assert ("is not known: no" in caplog.text) == (share is None)
