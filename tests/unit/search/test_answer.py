"""The answer of a search: a plan that can be asked for more, and used wherever its plan can."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from elixir.errors import InputError, InputTypeError
from elixir.plan.plan import plan_of
from elixir.search import Answer, optimal_search, plan_from_trace, planner
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import explain
from elixir.show.tables import record_of
from elixir.units import GIB
from tests.common.searching import HARDWARE, SMALL
from tests.common.synthetic_trace import stack_trace


@pytest.fixture(scope="module")
def answer() -> Answer:
    return optimal_search(stack_trace(SMALL), 1, hardware=HARDWARE, device_memory=GIB, host_budget=8 * GIB)


def test_an_answer_can_be_sent_to_another_process(answer: Answer) -> None:
    for other in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
        assert (other, other.question) == (answer, answer.question)


def test_printing_searches_nothing(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: object, **__: object) -> None:
        pytest.fail("searches again")

    for name in ("ShapeSearch", "judge_updates"):
        monkeypatch.setattr(planner, name, search)
    assert str(answer) == str(answer.plan)
    assert "device peak" in str(answer)


def test_what_has_no_plan_is_refused() -> None:
    with pytest.raises(InputTypeError, match="plan must be a Plan, got str"):
        plan_of("plan.json")  # type: ignore[arg-type]


def test_an_answer_is_explained_as_its_plan(answer: Answer) -> None:
    hardware = HARDWARE
    mine, of_plan = (explain(each, answer.trace, hardware, levers=False) for each in (answer, answer.plan))
    assert mine == of_plan
    assert len(repr(answer)) <= 2 * len(repr(answer.plan))


def test_what_is_of_another_kind_or_has_other_parameters_is_told() -> None:
    trace = stack_trace(SMALL, batch=1, seq=64)
    memory: Any = {"device_memory": 4 * GIB, "host_budget": GIB, "placement": "cuda"}
    with pytest.raises(InputTypeError, match="trace must be a StepTrace, got str"):
        plan_from_trace("a trace", HARDWARE, 1, **memory)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match=r"hardware must be a HardwareProfile, such as preset\('h200'\), got 3"):
        plan_from_trace(trace, 3, 1, **memory)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="expected a StepTrace, HardwareProfile or Plan, found str"):
        record_of("a plan")  # type: ignore[arg-type]
    plan = plan_from_trace(trace, HARDWARE, 1, **memory).plan
    more = replace(trace, parameters=(*trace.parameters, replace(trace.parameters[-1], name="another")))
    with pytest.raises(InputError, match=r"has \d+ parameters, the plan others; plan again"):
        simulate_step(plan, more, HARDWARE)
