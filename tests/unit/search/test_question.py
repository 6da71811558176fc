"""A question about a step reaches the tracer as it was asked, and is found again in what was made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.hardware.profile import preset
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.searches import answer_to
from elixir.step_trace import StepShape, Unit, UnitActivations
from tests.common.samples import make_hardware, make_plan, make_trace

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


def test_only_what_follows_from_a_name_is_traced_as_such(traced: Traced) -> None:
    own: dict[str, Any] = {"inp": {"x": 1}, "step_fn": print}
    for asked, checkpoint, name in (
        ({"model": NAMED}, "none", "opt-125m"),
        ({"model": NAMED, "checkpoint": "non-reentrant"}, "non-reentrant", "opt-125m"),
        ({"model": NAMED, "inp": own["inp"]}, None, "opt-125m"),
        ({"model": NAMED, "step_fn": own["step_fn"]}, None, "opt-125m"),
        ({"model": "./some/folder"}, "none", "./some/folder"),
        ({"model": nn.Linear(1, 1), **own}, None, None),
        ({"model": nn.Linear(1, 1)}, None, None),
    ):
        found = traced.of(**asked)
        assert (found["checkpoint"], found["model_name"]) == (checkpoint, name)
        assert found["step_fn"] == asked.get("step_fn", "default")


def test_inputs_are_those_given_or_the_default_ones(traced: Traced) -> None:
    given = {"x": 1}
    assert traced.of(model=NAMED, batch=3, seq=7)["inp"] == {"batch": 3, "seq": 7}
    assert traced.of(model=NAMED, batch=3)["inp"] == {"batch": 3, "seq": None}
    assert traced.of(model=NAMED, inp=given)["inp"] == given
    assert traced.of(model=NAMED, inp=lambda: given)["inp"] == given
    with pytest.raises(InputTypeError, match="inp must be a dict of the model's inputs, got int"):
        traced.of(model=NAMED, inp=3)
    with pytest.raises(InputTypeError, match=r"give step_fn\(model, inp\), which gets the batch as it is"):
        traced.of(model=NAMED, inp=lambda: [3])
    batch = object()
    for inp in (batch, lambda: batch):
        assert traced.of(model=NAMED, inp=inp, step_fn=print)["inp"] is batch


def test_a_model_by_name_that_is_evaluated_draws_no_random_numbers(traced: Traced) -> None:
    for asked, forward, training in (
        ({"model": NAMED}, False, True),
        ({"model": NAMED, "forward": True}, True, False),
        ({"model": NAMED, "generate": (5, 2)}, True, False),
        ({"model": nn.Linear(1, 1), "forward": True}, True, True),  # as the user has set it
    ):
        found = traced.of(**asked)
        assert (found["forward"], found["training"]) == (forward, training)


def test_a_generation_is_one_prompt_and_its_tokens(traced: Traced) -> None:
    found = traced.of(model=NAMED, generate=(5, 2), batch=4)
    assert (found["inp"], found["step_fn"]) == ({"batch": 4, "prompt": 5, "new": 2}, (5, 2))
    assert (found["generate"], found["checkpoint"]) == ((5, 2), "none")


def test_everything_else_goes_along(traced: Traced) -> None:
    how = {
        "use_fused_kernels": True, "compile": True, "optimizer": "SGD", "optimizer_kernel": "foreach", "lora": 4,
        "quantised": "nf4", "activations": (UnitActivations("x", ()),),
    }  # fmt: skip
    found = traced.of(model=NAMED, dtype="bf16", checkpoint="non-reentrant:2", positions=4096, **how)
    assert {name: found[name] for name in how} == how
    assert (found["dtype"], found["hardware"]) == (torch.bfloat16, HARDWARE)
    built = {"name": NAMED, "dtype": torch.bfloat16, "checkpoint": "non-reentrant:2", "lora": 4, "quantised": "nf4"}
    assert found["built"].how == built | {"max_positions": 4096}
    assert traced.of(model=NAMED)["dtype"] is None
    mine, kinds = nn.Linear(1, 1), dict[Any, Any]()
    StepQuestion(model=NAMED).trace(HARDWARE, mine, kinds)
    found = traced.pop()
    assert (found["built"] is mine, found["kinds"] is kinds) == (True, True)


def test_a_trace_is_its_own_answer() -> None:
    trace = make_trace()
    for dtype in (None, trace.dtype):
        assert StepQuestion(model=trace, dtype=dtype).trace(HARDWARE) is trace
    with pytest.raises(InputError, match=r"of dtype bfloat16, unified_dtype asks for float32"):
        StepQuestion(model=replace(trace, dtype="bfloat16"), dtype="float32").trace(HARDWARE)


@pytest.mark.parametrize("generate", [None, (5, 2)])
def test_the_question_is_found_again(generate: tuple[int, int] | None) -> None:
    made = make_trace()
    step = replace(
        made.step,
        checkpoint="non-reentrant",
        samples=6,
        tokens=54,
        generate=generate,
        lora=4,
        quantised="nf4",
        units=(Unit("x", "compiled", "Layer", "one"),),
    )
    trace = replace(made, step=step, model_name="opt-125m", optimizer="AdamW (foreach)", dtype="bfloat16")
    expected = StepQuestion(
        model="opt-125m", batch=6, seq=None if generate else 9, dtype="bfloat16", checkpoint="non-reentrant",
        generate=generate, lora=4, quantised="nf4", compile=True, optimizer="AdamW",
    )  # fmt: skip
    assert StepQuestion.again(trace) == expected
    assert StepQuestion.again(replace(trace, optimizer="none")).optimizer is None
    assert StepQuestion.again(replace(trace, dtype="as built")).dtype is None
    assert StepQuestion.again(replace(trace, step=replace(step, samples=None, tokens=None))).batch == 1
    longer = StepQuestion.again(replace(trace, step=replace(step, tokens=6 * 5000, generate=None)))
    assert (longer.seq, longer.positions) == (5000, 5000)  # more than the 2048 of OPT
    of_plan = replace(make_plan(4), step=step, model_name="opt-125m", dtype="bfloat16")
    assert StepQuestion.again(of_plan) == replace(expected, optimizer=None)  # a plan has no step of an optimizer


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


def test_a_plan_that_moves_layers_is_for_them_as_they_will_be_compiled() -> None:
    """The model that is asked about is compiled for its trace alone, and again for what a plan refuses."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    step = StepQuestion(model=model, inp=torch.ones(2, 8), step_fn=lambda it, x: it(x).sum().backward(), compile=True)
    plan = answer_to(step, preset("cpu"), SearchRequest(world_size=1, placement="cpu"), read_host=False).plan
    assert plan.step.compiled == ("0", "1", "2")
    assert all(chunk.state_home == "host" for chunk in plan.chunks)
    assert not any(layer._compiled_call_impl for layer in model)
