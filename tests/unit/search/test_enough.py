"""The first advice suffices if nothing fits; and the levers of a plan that fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elixir.errors import InputError, PlanError
from elixir.hardware.profile import preset
from elixir.search import plan_from_trace
from elixir.search.advise.answer import Answer, best_allowed
from elixir.search.planner import planned
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.step_trace import Contributor, StepTrace
from elixir.units import GIB, MIB
from tests.common.synthetic_trace import StackShape, stack_trace

MACHINE = preset("rtx4090")
SHAPE = StackShape(1024, 8, 4096, 8000, 512)
"""0.1 G parameters: 1.6 GiB of weights, masters and states."""
TINY = StackShape(64, 1, 256, 200, 128)


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    return stack_trace(SHAPE)


def refusal(trace: StepTrace, **budgets: Any) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan_from_trace(trace, MACHINE, 1, **budgets)
    return caught.value


def test_a_refusal_names_both_memories_and_what_holds_the_peak(trace: StepTrace) -> None:
    held = [
        Contributor("activations", "", "aten.empty.memory_format", 1, 5 * MIB),
        *(Contributor("activations", f"layers.{at}.fc", "aten.mm.default", 1, 3 * MIB) for at in range(2)),
        Contributor("parameters", "", "", 9, 90 * MIB),
        Contributor("workspace", "fc", "aten.mm.default", 1, 2 * MIB),
        Contributor("inputs", "", "", 1, MIB),
    ]
    refused = refusal(replace(trace, peak_contributors=tuple(held)), device_memory=4 * MIB, host_memory=64 * MIB)
    first, host, peak, *levers = str(refused).splitlines()
    assert "activations, inputs and buffers alone exceed the device memory" in first
    assert re.fullmatch(r"  host memory is short as well \(needed .* GiB, available 64.00 MiB, short by .*\)", host)
    assert peak == (
        "  at the peak: 6.00 MiB aten.mm.default in layers.*.fc, 5.00 MiB aten.empty.memory_format in no module, "
        "2.00 MiB of workspace of aten.mm.default"
    )
    assert all(line.startswith("  - ") for line in levers)
    refused = refusal(trace, device_memory=8 * GIB, host_memory=1, placement="cpu")
    assert re.fullmatch(
        r"weights, master weights and optimizer states are .* GiB, wherever they live", refused.details[0]
    )


def test_levers_of_a_plan_are_plans() -> None:
    given: dict[str, Any] = {"device_memory": GIB, "host_budget": 8 * GIB, "placement": "cuda"}
    trace = stack_trace(TINY)
    given["device_memory"] = plan_from_trace(trace, MACHINE, 1, **given).predicted.device_peak_bytes
    *levers, last = plan_from_trace(trace, MACHINE, 1, **given).levers()
    found = {lever.options: lever for lever in levers}
    gains = [lever.gain or 0.0 for lever in levers]
    assert gains == sorted(gains, reverse=True)
    assert repr(last) == "<Effect: accumulate 4 batches a step: does not fit>"
    eight = found[(("moments", "8bit"),)].plan
    asked = plan_from_trace(trace, MACHINE, 1, moments="8bit", **given)
    assert eight is not None
    assert eight.predicted.step_s == pytest.approx(asked.predicted.step_s, rel=0.03)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "budgets",
    [
        {"device_memory": 700 * MIB, "host_budget": 900 * MIB},
        {"device_memory": 600 * MIB, "host_budget": 1200 * MIB, "placement": "cpu"},
        {"device_memory": 1 * GIB, "host_budget": 64 * GIB, "placement": "cuda"},
        {"device_memory": 64 * MIB, "host_budget": 64 * GIB},
    ],
    ids=["host short", "all on the host", "all on the device", "device short"],
)
def test_the_first_advice_suffices(trace: StepTrace, budgets: Mapping[str, Any]) -> None:
    first = refusal(trace, **budgets).levers[0]
    assert first.step_s is not None
    given = {name: int(value) if name == "world_size" else value for name, value in first.options}
    ranks, asked = given.pop("world_size", 1), {**budgets, **given}
    plan_from_trace(trace, MACHINE, ranks, **asked)  # the safe choice, which may take longer at the machine's rates
    assert plan_from_trace(trace, MACHINE, ranks, assume="nominal", **asked).predicted.step_s <= 1.01 * first.step_s


def test_only_what_is_allowed_is_done(trace: StepTrace) -> None:
    question = Question(trace, MACHINE, SearchRequest(world_size=1, device_memory=GIB, host_budget=8 * GIB))
    assert best_allowed(question, ()) == (question, ())
    asked, taken = best_allowed(question, ("moments", "accumulation"))
    assert {kind for change in taken for kind in change.kinds} <= {"moments", "accumulation"}
    plain, better = (planned(one, briefly=True) for one in (question, asked))
    assert plain is not None
    assert better is not None
    assert Answer(better, asked).samples_per_s > Answer(plain, question).samples_per_s
    assert replace(asked.request, moments="float32", accumulation=1) == question.request
    with pytest.raises(InputError, match="cannot be allowed"):
        best_allowed(question, ("placement",))


def test_a_batch_that_is_far_too_large_is_cut_into_the_fewest_parts_that_fit() -> None:
    machine, named = preset("rtx3090"), StepQuestion(model="opt-125m", batch=256, seq=128, dtype="bfloat16")
    with pytest.raises(PlanError) as caught:
        plan_from_trace(named.trace(machine), machine, 1, device_memory=2 * GIB, host_budget=16 * GIB)
    first = caught.value.levers[0]
    given = {name: int(value) for name, value in first.options}
    assert given["batch"] * given["accumulation"] == 256
    assert 2 < given["accumulation"] < 256
    smaller = replace(named, batch=given["batch"]).trace(machine)
    plan_from_trace(
        smaller, machine, 1, device_memory=2 * GIB, host_budget=16 * GIB, accumulation=given["accumulation"]
    )
