"""Plans for several batches per step: what they need, how long they take, and which way to cut a step is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from elixir.errors import InputError, InputTypeError, PlanError
from elixir.models.activation_checkpointing import checkpointable_layers
from elixir.models.loading import build
from elixir.models.model_shape import describe
from elixir.models.step import default_input, default_step
from elixir.optimizer_states import StateSize
from elixir.plan.chunk_plan import Home
from elixir.search import batches, search_batches
from elixir.search.advise.answer import Answer
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packed_step import PackedStep, StepFacts
from elixir.search.problem.packing import ParamTable
from elixir.search.problem.placement import Placement, Setting
from elixir.search.question import StepQuestion
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.units import MIB
from tests.common.searching import HARDWARE, SMALL
from tests.common.synthetic_trace import TraceBuilder, stack_trace

PLENTY = 1 << 50


def trace_of(batch: int, checkpoint: str = "non-reentrant") -> StepTrace:
    """The sample stack with so many sequences."""
    return stack_trace(SMALL, batch=batch, seq=256, checkpoint=checkpoint != "none")


def test_with_room_for_everything_one_batch_without_checkpointing_is_best() -> None:
    options: dict[str, Any] = {"device_memory": PLENTY, "host_budget": PLENTY, "assume": "nominal"}
    shown: list[tuple[str, int, int]] = []
    choice = search_batches(
        trace_of,
        HARDWARE,
        1,
        samples=4,
        checkpoints=["non-reentrant", "none"],
        layers=1,  # between none and all of them, there is no number to try
        progress=lambda *s: shown.append(s),
        **options,
    )
    assert (choice.option.batch, choice.option.checkpoint) == (4, "none")
    assert [(way.split(",")[0], done, count) for way, done, count in shown] == [
        (f"{option.accumulation} x {option.batch} samples", done, 6 + 2 * 2)
        for done, option in enumerate(choice.options)
    ]
    only = search_batches(trace_of, HARDWARE, 1, samples=4, micro_batches=False, **options)
    assert [option.batch for option in only.options] == [4]
    odd = search_batches(trace_of, HARDWARE, 1, samples=6, **options)
    assert [option.batch for option in odd.options] == [6, 3]


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_the_batch_before_stay_through_the_next(world_size: int) -> None:
    """Gradients on the device add to the activations of forward; one that is added on the host, to its sum."""
    build, numel = TraceBuilder(), 8 * MIB
    weights = [build.parameter(f"w{i}", numel) for i in range(3)]
    for index in weights:
        build.use("forward", index, live=100 * MIB)
    for index in reversed(weights):
        build.use("backward", index)
    trace = build.build("three")
    packing = ParamTable(trace, world_size).pack(2 * numel)
    one, four = (
        MemoryModel(
            PackedStep(StepFacts(trace), packing), Setting(world_size, world_size, StateSize(8), False, accumulation)
        )
        for accumulation in (1, 4)
    )
    on_device, on_host = Placement((Home.RESIDENT,) * 3), Placement((Home.HOST,) * 3)
    before, after = one.need(on_device, 0), four.need(on_device, 0)
    assert before.device_parts["activations"] == after.device_parts["activations"] == 100 * MIB
    assert before.device_parts["gradients"] == 0
    assert after.device_parts["gradients"] == 3 * 2 * numel // world_size
    hosts = [model.need(on_host, 1).host_parts["gradients"] for model in (one, four)]
    # Shards of all ranks; one of them at a time is added, and another one is copied meanwhile.
    assert hosts == [3 * 2 * numel, 5 * 2 * numel]
    only_one = Placement((Home.RESIDENT, Home.RESIDENT, Home.HOST))
    assert four.need(only_one, 1).host_parts["gradients"] == 2 * 2 * numel  # with nothing to copy meanwhile


def exact_moves(exactly: list[float | None], seen: list[Answer]) -> Callable[..., Answer]:
    """Gives answers, in the order asked, so many times their predicted seconds; None: too large."""

    def exact(answer: Answer, step: StepQuestion) -> Answer:
        assert step.model is answer.question.trace
        seen.append(answer)
        times = exactly[len(seen) - 1]
        if times is None:
            raise PlanError("too large", needed_bytes=1 + PLENTY, available_bytes=PLENTY)
        predicted = answer.plan.predicted
        seconds = {phase: each * times for phase, each in predicted.seconds.items()}
        predicted = replace(predicted, seconds=seconds, fastest_s=seconds["total"])
        return replace(answer, plan=replace(answer.plan, predicted=predicted))

    return exact


@pytest.mark.parametrize(
    ("exactly", "wins"),
    [([1.0], 0), ([None, 1.0], 1), ([9.0, 1.0], 1), ([2.0, None, *[9.0] * 2], 0), ([None] * 4, None)],
)
def test_ways_are_compared_again_once_it_is_known_what_moves(
    exactly: list[float | None], wins: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Answer] = []
    monkeypatch.setattr(batches, "with_exact_moves", exact_moves(exactly, seen))
    options: dict[str, Any] = {"device_memory": 1000 * MIB, "host_budget": PLENTY, "search": "minimum_waste"}
    options |= {"samples": 2, "checkpoints": ["none", "non-reentrant"], "assume": "nominal"}
    if wins is None:
        with pytest.raises(PlanError, match="too large"):
            search_batches(trace_of, HARDWARE, 1, **options)
    else:
        choice = search_batches(trace_of, HARDWARE, 1, **options)
        assert choice.option in choice.options
        assert choice.answer.question is seen[wins].question
        assert choice.option.accumulation == choice.plan.accumulation == seen[wins].plan.accumulation
        assert choice.option.step_s == choice.plan.predicted.step_s
        assert sum(option.reason.startswith("too large") for option in choice.options) == exactly.count(None)
    steps = [answer.plan.predicted.step_s for answer in seen]
    assert (steps, len(seen)) == (sorted(steps), len(exactly))


def test_what_was_left_out_is_planned_if_what_seemed_faster_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Answer] = []
    monkeypatch.setattr(batches, "with_exact_moves", exact_moves([None, 1.0], seen))
    options: dict[str, Any] = {"device_memory": PLENTY, "host_budget": PLENTY, "search": "minimum_waste"}
    options |= {"samples": 1, "checkpoints": ["none", "non-reentrant"], "assume": "nominal"}
    choice = search_batches(trace_of, HARDWARE, 1, **options)
    first, second = choice.options
    assert first.reason.startswith("too large")
    assert (choice.option, second.checkpoint, second.reason) == (second, "non-reentrant", "")
    assert second.step_s == choice.plan.predicted.step_s > seen[0].plan.predicted.step_s


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"samples": 0}, InputError, "samples must be 1 or larger"),
        ({"samples": True}, InputTypeError, "samples must be a whole number"),
        ({"checkpoints": "none"}, InputTypeError, "checkpoints must be a list"),
        ({"checkpoints": []}, InputTypeError, "checkpoints must be a list"),
        ({"accumulation": 2}, InputError, "follows from samples"),
        ({"layers": "3"}, InputTypeError, "layers must be a whole number, got '3'"),
        ({"layers": -1}, InputError, "layers must be 0 or larger, got -1"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search_batches(trace_of, HARDWARE, 1, **{"samples": 4} | options)


LAYERS = 6
SHALLOW = describe("opt-125m").changed(layers=LAYERS, hidden=256, heads=4, ffn=1024, vocabulary=512)


@cache
def shallow(batch: int, checkpoint: str) -> StepTrace:
    model = build(SHALLOW, dtype=torch.bfloat16, checkpoint=checkpoint)
    inp = default_input(model, batch=batch, seq=256)
    return trace_step(model, inp, default_step, hardware=HARDWARE, optimizer=None)


def test_as_many_layers_are_checkpointed_as_are_asked_for() -> None:
    assert len(checkpointable_layers(build(SHALLOW))) == LAYERS
    assert shallow(1, "non-reentrant:2").checkpointed_modules == ("model.decoder.layers.0", "model.decoder.layers.1")
    with pytest.raises(InputError, match="has 6 layers .* 7 are asked for"):
        build(SHALLOW, checkpoint="reentrant:7")
    for wrong in ("none:2", "non-reentrant:", "non-reentrant:x", "reentrant:-1"):
        with pytest.raises(InputError, match="non-reentrant:12"):
            build(SHALLOW, checkpoint=wrong)
