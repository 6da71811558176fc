"""Plans that early_updates: what they say, which chunks they choose, and the memory that those take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.scenario import Scenario
from elixir.plan.chunk_plan import Home
from elixir.plan.plan import Plan
from elixir.plan.prediction import CHECKPOINT_PART
from elixir.search import Answer, plan_from_trace
from elixir.search.planner import setting_for
from elixir.search.problem.from_plan import setting_of
from elixir.search.problem.placement import Placement
from elixir.search.propose.candidate import Candidate, weigh
from elixir.search.propose.family import Shape, families
from elixir.search.propose.judge import TIE
from elixir.search.propose.search import ShapeSearch, judge_updates
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.question import Question
from elixir.search.replan import correct
from elixir.search.request import SearchRequest
from elixir.search.simulator import simulated_cost
from elixir.search.simulator.simulated_cost import SimulatedCost, worth_stepping, worth_stepping_within
from elixir.search.simulator.simulation import simulate_step
from elixir.show.tables import record_of
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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_is_shorter_for_memory_that_is_left(stack: StepTrace, world_size: int, accumulation: int) -> None:
    today = planned(stack, world_size, accumulation=accumulation, early_updates=False)
    plan = planned(stack, world_size, accumulation=accumulation, chunks_of=today)
    assert plan.has_early_updates
    assert not today.has_early_updates
    assert plan.clipping
    assert plan.predicted.seconds["total"] < 0.9 * today.predicted.seconds["total"]
    numel = sum(plan.chunks[index].numel for index in chosen(plan))
    assert plan.predicted.host_parts["new_states"] == numel * (4 + 8 + 2)  # masters, moments and rounded weights
    new_states = plan.predicted.host_parts["new_states"]
    assert plan.predicted.host_peak_bytes == today.predicted.host_peak_bytes + new_states <= plan.host_budget_bytes
    assert simulate_step(plan, stack, SLOW).step_s == pytest.approx(plan.predicted.seconds["total"], rel=1e-9)
    assert record_of(plan)["chunks_updated_early"] == len(chosen(plan))
    assert f"{len(chosen(plan))} updated early" in str(plan)


@pytest.mark.parametrize("early_updates", [None, False])
@pytest.mark.parametrize("accumulation", [3, 4, 5, 9])
def test_a_plan_has_the_seconds_that_its_simulation_has(
    stack: StepTrace, accumulation: int, early_updates: bool | None
) -> None:
    plan = planned(stack, accumulation=accumulation, early_updates=early_updates)
    assert plan.has_early_updates == (early_updates is None)
    assert simulate_step(plan, stack, SLOW).step_s == pytest.approx(plan.predicted.step_s, rel=1e-9)


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


def test_memory_that_is_left_is_never_passed(stack: StepTrace) -> None:
    today = planned(stack, early_updates=False)
    need, before_s = today.predicted.host_peak_bytes, today.predicted.seconds["total"]
    need -= today.predicted.host_parts.get(CHECKPOINT_PART, 0)  # takes what is left over
    roomy = planned(stack, early_updates=True)
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        budget = need + int(share * roomy.predicted.host_parts["new_states"])
        plan = planned(stack, host_budget=budget, early_updates=True)
        assert plan.predicted.host_peak_bytes <= budget
        assert plan.predicted.seconds["total"] <= before_s
        assert bool(chosen(plan)) == (share > 0)
        before_s = plan.predicted.seconds["total"]


def test_the_host_steps_more_than_it_must_if_backward_hides_that(stack: StepTrace) -> None:
    steady_host = replace(SLOW, host_adam_numel_per_s=1e9, device_adam_numel_per_s=2e9)
    never, plan = (
        planned(stack, machine=steady_host, placement="auto", early_updates=wish, assume="nominal")
        for wish in (False, None)
    )
    assert plan.has_early_updates
    assert plan.predicted.step_s < never.predicted.step_s / (1 + TIE)
    assert any(chunk.state_home == "host" for chunk in plan.chunks)


@pytest.mark.parametrize("wish", [True, False, None])
def test_a_plan_remembers_the_wish(stack: StepTrace, wish: bool | None) -> None:
    plan = planned(stack, early_updates=wish)
    assert Plan.from_json(plan.to_json()).may_update_early is wish
    assert setting_of(plan, 1, "cuda").early_updates is wish
    assert Answer.of(plan, stack, SLOW).question.request.early_updates is wish
    if wish is not False:
        with pytest.raises(InputError, match="'may_update_early' must be true or null"):
            replace(plan, may_update_early=False)


def test_nothing_is_chosen_that_does_not_pay(stack: StepTrace) -> None:
    fast = replace(SLOW, host_adam_numel_per_s=1e15)
    assert not planned(stack, machine=fast, early_updates=True).has_early_updates
    roomy = planned(stack, placement="cuda", early_updates=True)
    assert not roomy.has_early_updates  # all states are on the device


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("host_adam_numel_per_s", [2.5e8, 5e8, 1e9, 1.2e9, 1.4e9, 1.6e9, 2e9, 4e9])
def test_without_a_wish_it_takes_early_updates_that_gain(stack: StepTrace, host_adam_numel_per_s: float) -> None:
    machine = replace(SLOW, host_adam_numel_per_s=host_adam_numel_per_s)
    never, wherever, plan = (planned(stack, machine=machine, early_updates=wish) for wish in (False, True, None))
    assert wherever.predicted.step_s <= never.predicted.step_s
    assert plan.has_early_updates == (wherever.predicted.step_s < never.predicted.step_s)
    assert plan.predicted.step_s <= 1.001 * wherever.predicted.step_s


def test_without_a_wish_the_cores_of_a_cpu_are_left_alone(stack: StepTrace) -> None:
    cpu = replace(SLOW, device_kind="cpu", compute_capability=None)
    assert not planned(stack, machine=cpu).has_early_updates


def test_weights_on_the_device_return_after_the_norm(stack: StepTrace) -> None:
    plan = planned(stack, early_updates=True)
    chunks = tuple(replace(chunk, resident=True, weight_home="device") for chunk in plan.chunks)
    there = replace(plan, chunks=chunks)
    spans = simulate_step(there, stack, SLOW).timeline
    returned = [span for span in spans if span.name == "refresh" and span.chunk in chosen(plan)]
    norm = max(span.end_s for span in spans if span.name == "norm") if plan.world_size > 1 else 0.0
    assert len(returned) == len(chosen(plan))
    assert min(span.start_s for span in returned) >= norm
    made = {span.chunk: span for span in spans if span.name == "early update"}
    assert set(made) == set(chosen(plan))
    backward = min(span.start_s for span in spans if span.name == "backward")
    assert all(span.end_s > backward for span in made.values())


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


def test_files_say_it_and_refuse_what_cannot_be(stack: StepTrace) -> None:
    plan = planned(stack, early_updates=True)
    assert Plan.from_json(plan.to_json()) == plan
    chunk = plan.chunks[chosen(plan)[0]]
    for wrong in ({"state_home": "device", "weight_home": "device"}, {"grad_entry": None}):
        with pytest.raises(InputError, match="'update'"):
            replace(chunk, **wrong)  # type: ignore[arg-type]


def test_optimizers_of_other_classes_wait(stack: StepTrace) -> None:
    assert not planned(stack, optimizer_type="SGD", early_updates=True).has_early_updates


@pytest.mark.parametrize("kernel", ["foreach", "for-loop"])
def test_states_that_no_kernel_makes_are_copied_first(stack: StepTrace, kernel: str) -> None:
    """30 bytes an element in a step; 12 of masters and moments are read, and written to lines that are read before."""
    fused, looped = (planned(stack, optimizer_type=f"adamw{how}", early_updates=True) for how in ("", f" ({kernel})"))
    assert (fused.optimizer, looped.optimizer) == ("AdamW", f"AdamW ({kernel})")
    assert looped.state_size == fused.state_size
    assert looped.predicted.step_s > fused.predicted.step_s
    seconds = []
    for plan in (fused, Plan.from_json(replace(fused, optimizer=looped.optimizer).to_json())):
        spans = simulate_step(plan, stack, SLOW).timeline
        seconds.append(sum(span.end_s - span.start_s for span in spans if span.name == "early update"))
    assert seconds[1] / seconds[0] == pytest.approx(1 + 3 * 12 / 30)
    assert simulate_step(looped, stack, SLOW).step_s == pytest.approx(looped.predicted.step_s, rel=1e-9)
    assert setting_of(looped, 1, "cuda").copied
    assert plan_from_trace(*Answer.of(looped, stack, SLOW).question).chunks == looped.chunks
    narrow = planned(stack, optimizer_type=looped.optimizer, moments="bfloat16")
    assert not setting_of(narrow, 1, "cuda").copied  # stepped by this project, whatever the class


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


def test_chunks_that_memory_allows_lie_among_others_that_are_updated_later() -> None:
    """The first or the last chunks alone would be updated early otherwise, and forward would wait for many updates at once."""
    homes, order = {chunk: 9.0 - chunk for chunk in range(10)}, list(range(10))
    gradients = homes, 9.5, [0.5] * 10, order
    assert worth_stepping(*gradients) == set(range(10))
    assert worth_stepping_within(*gradients, [3] * 10, 30) == set(range(10))
    assert worth_stepping_within(*gradients, [3] * 10, 15) == {9, 7, 5, 3, 1}
    assert worth_stepping_within(*gradients, [3] * 10, 3) == {9}
    assert worth_stepping_within(*gradients, [3] * 10, 2) == frozenset()
    assert worth_stepping_within(*gradients, [3] * 9 + [4], 3) == {8}


@pytest.mark.parametrize("share", [0.2, 0.3, 0.4, 0.5])
def test_chunks_that_lie_among_others_shorten_a_step_more(
    stack: StepTrace, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(SLOW, host_adam_numel_per_s=4e8)
    space = SearchSpace(stack, machine, setting_for(Question(stack, machine, SearchRequest.of(1))))
    model = space.model(space.smallest_size)
    placement = Placement((Home.HOST,) * len(model.work.chunks))
    plain_bytes, most_bytes = (sum(model.host_parts(homes).values()) for homes in (placement, all_early(placement)))
    budget = plain_bytes + model.copies_bytes + int(share * (most_bytes - plain_bytes))

    def best() -> Candidate:
        plain, budgets = weigh(model, placement, 4, 1, space.cost), Budgets(1 << 40, budget)
        return judge_updates(space, budgets, plain, (Scenario(),)).best

    found = best()
    assert found.placement.early
    assert found.need.host_bytes <= budget - model.copies_bytes
    monkeypatch.setattr(simulated_cost, "worth_stepping_within", lambda *_: frozenset())
    assert found.seconds["total"] < 0.995 * best().seconds["total"]


def all_early(placement: Placement) -> Placement:
    return placement.updated_early(range(len(placement.homes)))


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
