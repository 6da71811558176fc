"""Plans of made-up steps on made-up machines are those that were recorded, with all that they predict and say.

A commit that means to change plans records them anew and says why:

    python -m tests.unit.search.test_recorded_plans

Other tests say what must hold for every plan. Here a term that was forgotten in a sum, or two candidates that changed
places, is seen although the plan stays consistent.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elixir.artifact import ADDED, digest
from elixir.errors import InputError, PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import Plan
from elixir.plan.process_need import process_need
from elixir.search import plan_from_trace
from elixir.search.advise.answer import Answer
from elixir.search.advise.changes import better_machine, for_memory, for_speed, more_machine
from elixir.search.question import Question
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import explain
from elixir.step_trace import StepTrace
from elixir.units import GIB, MIB
from tests.common.situations import situation

RECORDED = Path(__file__).with_suffix(".json")
SEEDS = tuple(seed for seed in range(39) if seed not in (5, 7, 9, 10, 12, 14, 19, 20, 22, 24, 37))
"""Seeds of steps of single parameters, without those that take longer than others."""
LAYERED = (
    2, 7, 9, 11, 13, 14, 25, 26, 28, 29, 33, 37, 40, 41, 45, 55, 57, 62,
    66, 69, 70, 73, 77, 81, 85, 92, 94, 95, 104, 106, 108, 119, 133, 137, 177,
)  # fmt: skip
"""Seeds of steps of layers."""
REFUSED = (2, 7, 13, 14, 26, 28, 29, 37, 40, 41, 44, 57, 66, 69, 73, 81, 95, 104, 106, 108, 133, 177)
"""Some of those with layers, with less memory, and a step that could be traced again if its model had a name."""
FAMILIES = {
    "layers": tuple(f"layers {seed}" for seed in LAYERED),
    "refused": tuple(f"refused {seed}" for seed in REFUSED),
    "parameters": tuple(map(str, SEEDS)),
}
NAMES = tuple(name for names in FAMILIES.values() for name in names)
WITH_LEVERS = "2"
"""Explained with all levers, which takes longer, since they plan again."""


def rounded(value: Any) -> Any:
    """`value` as JSON gives it back, its floats to nine digits: libraries may sum in another order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: rounded(item) for field, item in held if field.metadata != ADDED or item != field.default}
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return value if value is None or isinstance(value, (str, int)) else str(value)


def refused(draw: random.Random, name: str) -> dict[str, Any]:
    """The error of a search with less memory, and all that it advises."""
    trace, machine, options = situation(name)
    step = replace(
        trace.step, checkpoint="non-reentrant" if trace.step.checkpointed else "none", samples=draw.choice((2, 3))
    )
    operations = tuple(replace(each, kind="reduction") if draw.random() < 0.4 else each for each in trace.operations)
    trace = replace(trace, step=step, operations=operations, workspace_bytes=draw.randint(1, 8) * MIB)
    device = int(trace.activation_peak_bytes * draw.uniform(0.7, 1.1)) + trace.param_bytes // draw.choice((1, 4, 16))
    options |= {"device_memory": device, "host_budget": 8 * trace.param_bytes // draw.choice((1, 8, 32, 128))}
    try:
        plan = plan_from_trace(trace, machine, options.pop("asked"), **options).plan
    except PlanError as error:
        levers = [f"{lever!r}" for lever in error.levers]
        return {"error": str(error).splitlines(), "levers": digest(levers)}
    return {"plan": digest(planned(plan))}


def outcome(name: str) -> dict[str, Any]:
    """The outcome of one search: the plan in short and the digest of all of it, or the error."""
    if name.startswith("refused"):
        return refused(random.Random(name), f"layers {name.split()[1]}")
    try:
        trace, machine, options = situation(name)
        answer = plan_from_trace(trace, machine, options.pop("asked"), **options)
    except (InputError, PlanError) as error:
        return {"error": str(error).splitlines()}
    plan = answer.plan
    found: dict[str, Any] = {
        "step_s": plan.predicted.step_s,
        "chunks": [f"{chunk.weight_home}/{chunk.state_home}/{chunk.resident}/{chunk.update}" for chunk in plan.chunks],
        "blocks": plan.block_count,
        "device_bytes": plan.predicted.device_parts,
        "host_bytes": plan.predicted.host_parts,
        "moved_bytes": plan.predicted.moved_bytes,
        "plan": digest(planned(plan)),
        "text": digest(words(plan)),
        "process": [process_need(plan, kind, host_bytes=0, given_bytes=10**9).peak_bytes for kind in ("cuda", "cpu")],
        "follows": digest(following(plan)),
        "step": digest(rounded(simulated(plan, trace, machine))),
        "changes": digest(rounded(changes(answer))),
    }
    explanation = explain(answer, trace, machine, levers=name == WITH_LEVERS)
    found["explained"] = digest(rounded(explanation))
    if name == WITH_LEVERS:
        found["levers"] = [f"{each.action}: {each.step_s:.9g}" for each in explanation.levers + explanation.changes]
    return rounded(found)  # type: ignore[no-any-return]


def planned(plan: Plan) -> Any:
    """All of a plan that a search decides."""
    left_out = ("fingerprint", "version", "created")
    data = json.loads(plan.to_json())
    return rounded({name: value for name, value in data.items() if not any(word in name for word in left_out)})


def following(plan: Plan) -> Any:
    """Everything that follows from its fields, texts included."""
    predicted = plan.predicted
    found: dict[str, Any] = {
        f"{type(each).__name__}.{name}": getattr(each, name)
        for each in (plan, predicted, plan.chunks[0], plan.chunks[-1], plan.step, *predicted.judgements)
        for name, value in sorted(vars(type(each)).items())
        if isinstance(value, (property, functools.cached_property)) and name not in ("fingerprint", "environment")
    }
    found |= {f"regret, measured {measured}": predicted.regret_text(measured) for measured in (False, True)}
    found |= {f"routes of rank {rank}": plan.routes(rank) for rank in (0, plan.world_size - 1)}
    found |= {f"for {count} micro-batches": plan.prediction_for(count) for count in (1, 3, 4)}
    return rounded(found | {"time": predicted.time_text()})


def changes(answer: Answer) -> list[Any]:
    """All changes that a user could make, as if the step could be traced again by the name of its model."""
    trace, machine, request = answer.question
    again = replace(trace, step=replace(trace.step, checkpoint="non-reentrant" if trace.step.checkpointed else "none"))
    question, size = Question(again, machine, request), 16 * GIB
    more = [change for which in ("device", "host") for change in more_machine(question, which, "16GiB", size)]
    return [*for_speed(question), *for_memory(question), *more, *better_machine(answer.plan, answer.question)]


def words(plan: Plan) -> list[str]:
    """All that a plan says of itself."""
    assert Plan.from_json(plan.to_json()) == plan
    return [text.replace(plan.fingerprint, "") for text in (str(plan), repr(plan), plan.summary())]


def simulated(plan: Plan, trace: StepTrace, machine: HardwareProfile) -> list[Any]:
    """Its step, clipped or not, with all spans of work."""
    return [simulate_step(plan, trace, machine, clipped=clipped) for clipped in (False, True)]


def check(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


@pytest.mark.parametrize("name", FAMILIES["refused"])
def test_a_refusal_is_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", FAMILIES["parameters"])
def test_a_plan_of_single_parameters_is_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", FAMILIES["layers"])
def test_a_plan_of_layers_is_as_recorded(name: str) -> None:
    check(name)


ENOUGH = (
    *("2", "4", "11", "18", "31", "32"),
    *(f"layers {n}" for n in (2, 7, 14, 28, 33, 40, 41, 45, 57, 66, 73, 77, 81, 95, 104, 106, 108, 133, 137, 177)),
)


@pytest.mark.parametrize("name", ENOUGH)
def test_the_memory_that_a_plan_takes_is_enough_for_it(name: str) -> None:
    trace, machine, options = situation(name)
    ranks, options["assume"] = options.pop("asked"), "nominal"
    wide = plan_from_trace(trace, machine, ranks, **options).plan.predicted
    options |= {"device_memory": wide.device_peak_bytes, "host_budget": wide.host_step_bytes}
    narrow = plan_from_trace(trace, machine, ranks, **options).plan
    assert narrow.predicted.step_s == pytest.approx(wide.step_s)
    assert narrow.predicted.device_peak_bytes <= wide.device_peak_bytes
    assert narrow.predicted.host_step_bytes <= wide.host_step_bytes


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in NAMES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
