"""Plans that early_updates: what they say, which chunks they choose, and the memory that those take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.scenario import Scenario
from elixir.plan.chunk_plan import Home
from elixir.plan.plan import Plan
from elixir.search import Answer, plan_from_trace
from elixir.search.planner import setting_for
from elixir.search.problem.placement import Placement
from elixir.search.propose.candidate import weigh
from elixir.search.propose.family import Shape, families
from elixir.search.propose.judge import TIE
from elixir.search.propose.search import ShapeSearch, judge_updates
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.question import Question
from elixir.search.replan import correct
from elixir.search.request import SearchRequest
from elixir.search.simulator.simulated_cost import SimulatedCost
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.observed import steady
from tests.common.searching import HARDWARE
from tests.common.synthetic_trace import StackShape, stack_trace

SMALL = StackShape(hidden=256, layers=6, ffn=1024, vocab=1024, positions=256)
SLOW = replace(HARDWARE, flops_per_s={"bfloat16": 2e12, "float16": 2e12}, host_adam_numel_per_s=2.5e8)
"""The host's Adam takes longer than backward."""


@pytest.fixture(scope="module")
def stack() -> StepTrace:
    return stack_trace(SMALL, batch=2, seq=256)


def planned(trace: StepTrace, world_size: int = 1, machine: HardwareProfile = SLOW, **options: Any) -> Plan:
    return answered(trace, world_size, machine, **options).plan


def answered(trace: StepTrace, world_size: int = 1, machine: HardwareProfile = SLOW, **options: Any) -> Answer:
    given = {"device_memory": 1 << 40, "host_budget": 64 * GIB, "placement": "cpu", "assume": "nominal"}
    return plan_from_trace(trace, machine, world_size, **(given | options))


def chosen(plan: Plan) -> list[int]:
    return [index for index, chunk in enumerate(plan.chunks) if chunk.home.early]


def test_a_lever_promises_what_planning_with_it_gives(stack: StepTrace) -> None:
    """At the rates of the machine, over the fastest plan as it is; a longer search may find a little more."""
    device = planned(stack, placement="cuda").predicted.device_peak_bytes // 2
    given: dict[str, Any] = {"placement": "auto", "device_memory": device, "search": "minimum_waste"}
    answer = answered(stack, **given, assume="scenarios")
    levers = {lever.options: lever for lever in answer.levers()}
    fastest_s = answer.plan.predicted.fastest_s
    assert fastest_s is not None
    for name, value in (("accumulation", 4), ("moments", "8bit")):
        (promised,) = (lever for options, lever in levers.items() if dict(options) == {name: str(value)})
        assert promised.step_s is not None
        made_s = planned(stack, **given, assume="nominal", **{name: value}).predicted.step_s
        assert promised.step_s / answer.plan.predicted.step_s == pytest.approx(made_s / fastest_s, rel=0.02)


def test_the_host_steps_more_than_it_must_if_backward_hides_that(stack: StepTrace) -> None:
    steady_host = replace(SLOW, host_adam_numel_per_s=1e9, device_adam_numel_per_s=2e9)
    never, plan = (
        planned(stack, machine=steady_host, placement="auto", early_updates=wish, assume="nominal")
        for wish in (False, None)
    )
    assert plan.has_early_updates
    assert plan.predicted.step_s < never.predicted.step_s / (1 + TIE)
    assert any(chunk.state_home == "host" for chunk in plan.chunks)


def test_without_a_wish_the_cores_of_a_cpu_are_left_alone(stack: StepTrace) -> None:
    cpu = replace(SLOW, device_kind="cpu", compute_capability=None)
    assert not planned(stack, machine=cpu).has_early_updates


def test_a_plan_that_is_made_again_has_all_early_updates_that_pay(stack: StepTrace) -> None:
    least = planned(stack, early_updates=True).predicted.device_peak_bytes  # leaves no room for states on the device
    best = planned(stack, early_updates=True, placement="auto", device_memory=least)
    only = chosen(best)[0]
    chunks = tuple(
        replace(chunk, update="early" if index == only else "after_norm") for index, chunk in enumerate(best.chunks)
    )
    step_s = simulate_step(replace(best, chunks=chunks), stack, SLOW).step_s
    seen = replace(steady(best), step_s=step_s)
    again = correct(stack, SLOW, replace(best, chunks=chunks), [seen], "Adam").plan
    assert again is not None
    assert chosen(again) == chosen(best)


def test_no_plan_with_the_least_prefetch_and_the_most_states_on_the_device_is_faster() -> None:
    """Two chunks are a layer of large blocks: each that prefetch takes displaces states of a tenth of the chunks."""
    hardware = replace(preset("a100"), devices_per_host=8)
    wide = stack_trace(replace(SMALL, hidden=4096, layers=32, ffn=172032, vocab=32000), batch=1, seq=128)
    request = SearchRequest.of(8, device_memory=16 * GIB, host_budget=8 * 480 * GIB)
    space = SearchSpace(wide, hardware, setting_for(Question(wide, hardware, request)))
    budgets, sizes = Budgets(16 * GIB, 8 * 480 * GIB), space.sizes(outsized=True)
    outcome = ShapeSearch(space, budgets, sizes, (Scenario(),)).find()
    fastest_s = 0.0 if outcome is None else outcome.fastest_s or 0.0
    found = []
    for family in families(space, budgets, sizes):
        placed = family.placed(Shape(family, family.least_away, family.fewest[0], 0))
        if placed is not None:
            plain = weigh(family.model, *placed, 0, space.cost)
            found.append(judge_updates(space, budgets, plain, (Scenario(),)).fastest_s or 0.0)
    assert found
    assert fastest_s <= min(found)


@pytest.mark.parametrize(("accumulation", "device_kind"), [(1, "cuda"), (2, "cuda"), (1, "cpu")])
def test_a_placement_takes_as_long_whatever_was_estimated_before(
    stack: StepTrace, accumulation: int, device_kind: str
) -> None:
    """Placements that differ in early updates share the simulation of what comes before these."""
    machine = replace(SLOW, device_kind=device_kind, **({"compute_capability": None} if device_kind == "cpu" else {}))
    request = SearchRequest.of(1, early_updates=True, accumulation=accumulation)
    setting = setting_for(Question(stack, machine, request))
    space = SearchSpace(stack, machine, setting)
    model = space.model(space.smallest_size)
    chunks = range(len(model.work.chunks))
    plain = Placement((Home.HOST,) * len(chunks))
    some = [plain.updated_early(early) for early in (chunks[:3], chunks, chunks[2:], (), chunks[:3])]
    found = [weigh(model, placement, 4, 1, space.cost).seconds for placement in some]
    alone = [weigh(model, each, 4, 1, SimulatedCost(stack, machine, setting)).seconds for each in some]
    assert found == alone
    assert found[0] == found[4]
    assert len({seconds["total"] for seconds in found}) > 1
