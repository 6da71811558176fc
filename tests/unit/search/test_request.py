"""One request holds all options: checked once, shown by every function that takes them, passed on as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import elixir
from elixir.errors import InputError, InputTypeError
from elixir.hardware.profile import preset
from elixir.plan.chunk_plan import divisions
from elixir.search import minimum_waste_search, optimal_search, plan_from_trace, simple_search
from elixir.search.problem.coarse_trace import pass_trace
from elixir.search.problem.from_plan import packed_step_of
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.sweep import sweep
from tests.common.samples import make_plan, make_trace
from tests.common.searching import HARDWARE, SMALL, check_consistent
from tests.common.synthetic_trace import stack_trace


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"world_size": 0}, InputError, "world_size must be 1 or larger"),
        ({"world_size": 1 << 21}, InputError, "at most"),
        ({"accumulation": 1.5}, InputTypeError, "accumulation must be a whole number"),
        ({"placement": "disk"}, InputError, "placement must be one of"),
        ({"search": "best"}, InputError, "search must be one of"),
        ({"moments": "4bit"}, InputError, "8bit"),
        ({"moments": "8bit", "optimizer_type": "SGD"}, InputError, "found the optimizer SGD"),
        ({"device_memory": "12XB"}, InputError, "12XB"),
        ({"host_reserve": "12XB"}, InputError, "12XB"),
        ({"disk_memory": -1}, InputError, "-1"),
        ({"device_memory": "1GiB", "device_reserve": 0}, InputError, "taken as given"),
        ({"clipping": "yes"}, InputTypeError, "clipping must be"),
        ({"replicas": 0}, InputError, "replicas must be 1 or larger"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_asked(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SearchRequest(**{"world_size": 1, **options})
    request = SearchRequest(world_size=1)
    with pytest.raises(error, match=message):
        replace(request, **options)


@pytest.mark.parametrize("function", [optimal_search, minimum_waste_search, simple_search, elixir.wrap])
def test_an_unknown_option_names_the_nearest(function: Any) -> None:
    with pytest.raises(InputTypeError, match="did you mean device_memory"):
        function(stack_trace(SMALL), 1, device_memry="1GiB")
    with pytest.raises(InputTypeError, match="did you mean device_memory"):
        SearchRequest.of(1, device_memry="1GiB")


def test_auto_takes_the_fastest_number_of_replicas() -> None:
    plenty = {"device_memory": "4GiB", "host_budget": "4GiB", "search": "minimum_waste", "assume": "nominal"}
    trace = stack_trace(SMALL, batch=2)
    machines = replace(HARDWARE, network_bytes_per_s=1e9, devices_per_host=2)
    plans = {number: plan_from_trace(trace, machines, 4, replicas=number, **plenty).plan for number in (1, 2)}
    assert (plans[2].shards, plans[2].predicted.moved_bytes["replicas"] > 0) == (2, True)
    check_consistent(plan_from_trace(trace, HARDWARE, 4, replicas=2, **plenty).plan, trace)
    assert plans[2].predicted.step_s < plans[1].predicted.step_s
    answer = plan_from_trace(trace, machines, 4, replicas="auto", **plenty)
    assert answer.plan == plans[2]
    assert answer.question.request.replicas == 2


def test_ranks_that_cannot_form_replicas_are_refused_before_a_trace() -> None:
    with pytest.raises(InputError, match="a divisor of 2 from 1 to 1"):
        optimal_search(torch.nn.Linear(2, 2), 2, hardware=HARDWARE, replicas=2, inp={}, step_fn=pytest.fail)
    options = {"step": StepQuestion(seq=16, dtype="bf16"), "device_memory": "8GiB", "assume": "nominal"}
    rows = sweep(["opt-125m"], ["h100"], [1, 4], replicas=2, **options)
    assert [row.fits for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "expected"),
    [(16, 8, (1, 2, 4, 8)), (4, 2, (1, 2)), (12, 4, (1, 3, 6)), (1, 1, (1,)), (6, 4, (1, 3)), (3, 2, (1,))],
)
def test_divisions_that_fit_the_machines(world_size: int, ranks_per_host: int, expected: tuple[int, ...]) -> None:
    assert divisions(world_size, ranks_per_host) == expected


def test_an_option_that_is_gone_says_what_took_its_place() -> None:
    with pytest.raises(InputError, match="early updates have taken the place"):
        SearchRequest.of(1, step_in_backward=True)


def test_a_missing_or_doubled_argument_is_refused() -> None:
    with pytest.raises(InputTypeError, match="world_size"):
        optimal_search(stack_trace(SMALL))
    with pytest.raises(InputTypeError, match="multiple values"):
        optimal_search(stack_trace(SMALL), 1, world_size=2)


def test_a_step_that_does_not_follow_from_its_question_is_refused() -> None:
    trace = make_trace()
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: StepQuestion(model=trace).build(), InputTypeError, "no model to build"),
        (lambda: StepQuestion(model="opt-125m", generate=3), InputTypeError, "generate is"),  # type: ignore[arg-type]
        (lambda: StepQuestion(model="opt-125m", generate=(2, 2), packed=2), InputError, "leave out packed="),
        (lambda: StepQuestion(model=torch.nn.Linear(1, 1), packed="2:flash"), InputError, "set attn_implementation="),
        (lambda: StepQuestion(model="llama-3-8b", packed="2:flash").trace(preset("cpu")), InputError, "leave out :flash"),
        (lambda: StepQuestion.again(replace(trace, step=replace(trace.step, checkpoint=None))), InputError, "traced again"),
        (lambda: plan_from_trace(replace(trace, accesses=()), HARDWARE, 1), InputError, "uses no parameter"),
        (lambda: packed_step_of(make_plan(4), make_trace(layers=3)), InputError, "lacks"),
        (lambda: pass_trace(replace(trace, step=replace(trace.step, forward=True)), 2), InputError, "is for training"),
        (lambda: pass_trace(trace, 2), InputError, "turn on activation checkpointing"),
        (lambda: optimal_search(trace, 1, unified_dtype="float16"), InputError, "unified_dtype asks for float16"),
        (lambda: simple_search(trace, 1, allocate_factor=0), InputError, "must be above 0 and at most 1"),
        (lambda: simple_search(trace, 1, allocate_factor=1.5), InputError, "must be above 0 and at most 1"),
        (lambda: simple_search(trace, 1, allocate_factor="all"), InputTypeError, "must be a number"),
        (lambda: simulate_step(make_plan(4), "step", HARDWARE), InputTypeError, "trace must be a StepTrace"),  # type: ignore[arg-type]
        (lambda: simulate_step(make_plan(4), trace, "h200"), InputTypeError, "must be a HardwareProfile"),  # type: ignore[arg-type]
    ]  # fmt: skip
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
