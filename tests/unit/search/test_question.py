"""A question about a step reaches the tracer as it was asked, and is found again in what was made of it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.search.question import StepQuestion
from elixir.step_trace import StepShape
from tests.common.samples import make_hardware

HARDWARE = make_hardware()
NAMED = "Facebook/OPT-125m"


class Traced(list[dict[str, Any]]):
    """All that the tracer was given, instead of traces; models by name are tiny ones."""

    def of(self, **asked: Any) -> dict[str, Any]:
        StepQuestion(**asked).trace(HARDWARE)
        return self.pop()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    calls = Traced()

    def trace_step(model: nn.Module, inp: Any, step_fn: Any, *, shape: StepShape, **how: Any) -> None:
        given = {"built": model, "inp": inp, "step_fn": step_fn, "training": model.training}
        calls.append(given | how | vars(shape))

    def build(name: str, **how: Any) -> nn.Module:
        made = nn.Linear(1, 1)
        made.how = {"name": name} | how  # type: ignore[assignment]
        return made

    monkeypatch.setattr("elixir.tracer.trace.trace_step", trace_step)
    monkeypatch.setattr("elixir.models.loading.build", build)
    monkeypatch.setattr("elixir.models.step.input_to_trace", lambda _, **how: how)
    monkeypatch.setattr("elixir.models.step.default_step", "default")
    monkeypatch.setattr("elixir.models.step.generation_input", lambda _, **how: how)
    monkeypatch.setattr("elixir.models.step.generation_step", lambda *tokens: tokens)
    return calls


def test_a_generation_is_one_prompt_and_its_tokens(traced: Traced) -> None:
    found = traced.of(model=NAMED, generate=(5, 2), batch=4)
    assert (found["inp"], found["step_fn"]) == ({"batch": 4, "prompt": 5, "new": 2}, (5, 2))
    assert (found["generate"], found["checkpoint"]) == ((5, 2), "none")


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"dtype": "bf17"}, InputError, "bf17"),
        ({"quantised": "nf4"}, InputError, "nothing would train"),
        ({"positions": 0}, InputError, "positions must be 1 or larger"),
        ({"positions": 8, "model": nn.Linear(1, 1)}, InputError, "set its config's max_position_embeddings"),
        ({"generate": [3, 2]}, InputTypeError, "generate is"),
        ({"generate": (3, 2, 1)}, InputTypeError, "generate is"),
        ({"generate": (3, 0)}, InputError, "generate must be 1 or larger"),
        ({"generate": (3, 2), "seq": 4}, InputError, "leave out seq="),
        ({"generate": (3, 2), "inp": {}}, InputError, "leave out inp="),
        ({"generate": (3, 2), "step_fn": print}, InputError, "leave out step_fn="),
    ],
)
def test_a_question_that_contradicts_itself_is_refused(
    asked: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        StepQuestion(**{"model": NAMED} | asked)
    for enough in ({"lora": 4}, {"forward": True}, {"generate": (3, 2)}):
        assert StepQuestion(model=NAMED, quantised="nf4", **enough).quantised == "nf4"  # type: ignore[arg-type]
