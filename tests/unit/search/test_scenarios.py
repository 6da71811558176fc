"""A plan loses little in every scenario that its profile thinks possible, and says how much."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from benchmark import regret
from elixir.errors import ArtifactError, InputError, InputTypeError
from elixir.hardware import scenario as possible
from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.rate_fit import RateFit
from elixir.hardware.scenario import Scenario, scenarios
from elixir.plan.plan import Plan, same_packing
from elixir.plan.prediction import NOTICEABLE_REGRET
from elixir.search import plan_from_trace
from elixir.search.advise.answer import Answer
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.searching import HARDWARE
from tests.common.synthetic_trace import StackShape, stack_trace

STACK = StackShape(hidden=256, layers=12, ffn=1024, vocab=1024, positions=256)
MACHINE = replace(HARDWARE, flops_per_s={"bfloat16": 2e12, "float16": 2e12}, host_adam_numel_per_s=8e8)
"""Early updates pay, and CPU Adam is done before the step is, but not if it takes three times as long."""


@pytest.fixture(scope="module")
def stack() -> StepTrace:
    return stack_trace(STACK, batch=2, seq=256)


@pytest.fixture(scope="module")
def short_bytes(stack: StepTrace) -> int:
    """Memory of a device that is too small for all states."""
    whole = planned(stack, 1 << 40, placement="cuda")
    return int(0.6 * whole.predicted.device_peak_bytes)


@pytest.fixture(scope="module")
def plan(stack: StepTrace, short_bytes: int) -> Plan:
    return planned(stack, short_bytes, assume="scenarios")


@pytest.fixture(scope="module")
def nominal(stack: StepTrace, short_bytes: int) -> Plan:
    return planned(stack, short_bytes, assume="nominal")


_PLANS: dict[tuple[Any, ...], tuple[StepTrace, Plan]] = {}


def planned(trace: StepTrace, device_memory: int, machine: HardwareProfile = MACHINE, **options: Any) -> Plan:
    """Several tests ask for the same plan."""
    key = (id(trace), device_memory, repr(machine), repr(options))
    if key not in _PLANS or "chunks_of" in options:
        made = plan_from_trace(trace, machine, 1, device_memory=device_memory, host_budget=64 * GIB, **options)
        _PLANS[key] = trace, made.plan
    return _PLANS[key][1]


def seconds(plan: Plan, trace: StepTrace, scenario: Scenario) -> float:
    return simulate_step(plan, trace, scenario.machine(MACHINE), clipped=scenario.clipped).step_s


def worst(plan: Plan, trace: StepTrace, best_s: dict[Scenario, float]) -> float:
    return max(seconds(plan, trace, each) / least_s - 1 for each, least_s in best_s.items())


@pytest.mark.parametrize("measured_at", [None, "2026-01-31"])
def test_scenarios_are_all_combinations_of_what_the_profile_thinks_possible(measured_at: str | None) -> None:
    fits = {"host_adam.2": RateFit(1e-3, 1e9, 0.25), "host_to_device": RateFit(1e-3, 5e10, 0.6)}
    fits |= {"device_to_host": RateFit(1e-3, 5e10, 1.0), "host_memory": RateFit(0.0, 1e11, 3.0)}
    before = replace(preset("h100"), step_range=None, measured_at=measured_at, fits=fits)
    least = (possible.SLOW_HOST_ADAM, possible.SLOW_LINK) if measured_at is None else (1 / 1.25, 1 / 2)
    for adam, link, kept in itertools.product((None, 0.5, 1.0), (None, 0.98), (None, 0.5, 0.0, 0.97)):
        machine = replace(before, host_adam_least=adam, link_least=link, early_kept=kept)
        slow_adam, slow_link = (low if said is None else said for low, said in zip(least, (adam, link), strict=True))
        clipped = {0.0: [True], 0.97: [False]}.get(-1.0 if kept is None else kept, [False, True])
        links, adams = ([1.0, rate] if rate < 0.97 else [1.0] for rate in (slow_link, slow_adam))
        expected = [Scenario(*rates[::-1], each) for each in clipped for rates in itertools.product(links, adams)]
        assert list(scenarios(machine, clips=True)) == expected
        assert not any(each.clipped for each in scenarios(machine, clips=False))
        known = {"host_adam": adam, "link": link, "clipped": kept}
        assert possible.unmeasured(machine) == {name for name, said in known.items() if said is None}
        (fast, low), (slow, high) = possible.extremes(machine)
        expected = [Scenario(1 / low, 1 / low), Scenario(min(1 / high, slow_adam), min(1 / high, slow_link))]
        if measured_at is None:
            expected = [Scenario(possible.FAST_HOST_ADAM), Scenario(slow_adam, slow_link)]
        assert [fast, slow] == expected
        assert (low, high) == (possible.UNKNOWN_RANGE if measured_at is None else possible.MEASURED_RANGE)
    for key, factor in (("host_adam.2", 2), ("host_adam", 2), ("host_to_device", 4), ("device_adam", 1)):
        own, slower = before.rate(key), Scenario(0.5, 0.25).machine(before).rate(key)
        assert (slower.latency_s, slower.per_s * factor) == (own.latency_s, pytest.approx(own.per_s)), key
    assert Scenario().differences(Scenario(0.3, 0.6, True)) == 3 > Scenario().differences(Scenario(0.3)) == 1


def test_a_file_whose_judgements_make_no_sense_is_refused(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    data["predicted"]["judgements"][0]["best_s"] = 0
    with pytest.raises(ArtifactError, match="best_s' must be above 0, found 0"):
        Plan.from_json(json.dumps(data))
    data = json.loads(plan.to_json())
    data["predicted"]["regret_if_known"] = {"weather": 0.1}
    with pytest.raises(ArtifactError, match="'regret_if_known' must name some of .*'weather'"):
        Plan.from_json(json.dumps(data))


@pytest.mark.slow
def test_a_plan_loses_no_more_than_those_for_one_scenario(plan: Plan, stack: StepTrace, short_bytes: int) -> None:
    best_s = {each.scenario: each.best_s for each in plan.predicted.judgements}
    for scenario in (Scenario(), Scenario(0.3), Scenario(clipped=True)):
        options: dict[str, Any] = {"early_updates": False} if scenario.clipped else {}
        other = planned(stack, short_bytes, scenario.machine(MACHINE), assume="nominal", **options)
        # Tied within a point, and what is not searched is known within one.
        assert worst(plan, stack, best_s) <= worst(other, stack, best_s) + 0.011
        assert best_s[scenario] <= seconds(other, stack, scenario) * 1.02


def test_nominal_plans_are_the_fastest_at_the_profiles_rates(plan: Plan, nominal: Plan) -> None:
    assert nominal.predicted.step_s == nominal.predicted.fastest_s == pytest.approx(plan.predicted.fastest_s)
    assert nominal.predicted.step_s < plan.predicted.step_s
    assert nominal.predicted.judgements == ()
    assert (plan.assume, nominal.assume) == ("scenarios", "nominal")
    assert "regret" not in str(nominal)


@pytest.mark.parametrize("known", [False, True])
def test_what_fits_on_the_device_stays_there_for_a_few_points(known: bool) -> None:
    """Host steps that would save less are not bet on: how long they take next to the launching thread is not known."""
    machine = preset("h200")
    if known:
        machine = replace(machine, host_adam_least=1.0, link_least=1.0, early_kept=1.0)
        assert len(scenarios(machine, clips=True)) == 1
    for hidden in (64, 128):
        tiny = stack_trace(StackShape(hidden, 4, 4 * hidden, 1000, 64), batch=2, seq=64)
        plan, fastest = (planned(tiny, 64 * GIB, machine, assume=assume) for assume in ("scenarios", "nominal"))
        assert plan.counts["states_on_host_chunks"] == 0 < fastest.counts["states_on_host_chunks"]
        assert plan.predicted.fastest_s == fastest.predicted.step_s > plan.predicted.step_s / 1.05


def test_forced_homes_are_not_updated_early_where_every_step_is_clipped(stack: StepTrace) -> None:
    def forced(machine: HardwareProfile, **options: Any) -> Plan:
        return planned(stack, 1 << 40, machine, placement="cpu", **options)

    kept, clipped = (replace(MACHINE, early_kept=share) for share in (1.0, 0.0))
    for assume in ("scenarios", "nominal"):
        assert forced(kept, assume=assume).has_early_updates
        assert not forced(clipped, assume=assume).has_early_updates
        assert forced(clipped, assume=assume, early_updates=True).has_early_updates


def test_chunks_of_a_plan_are_kept(stack: StepTrace, short_bytes: int, plan: Plan) -> None:
    for device_memory in (short_bytes, 1 << 40):
        again = planned(stack, device_memory, chunks_of=plan)
        assert same_packing(again, plan)
    assert plan.counts["states_on_host_chunks"] > again.counts["states_on_host_chunks"] == 0
    assert planned(stack, short_bytes, chunks_of=plan, placement="cpu").placement == "cpu"
    with pytest.raises(InputError, match="chunks_of is a plan for 1 ranks"):
        plan_from_trace(stack, MACHINE, 2, host_budget=64 * GIB, chunks_of=plan)
    other = stack_trace(replace(STACK, layers=3), batch=2, seq=256)
    with pytest.raises(InputError, match="no chunk size packs the step"):
        planned(other, short_bytes, chunks_of=plan)
    with pytest.raises(InputTypeError, match="plan must be a Plan"):
        planned(stack, short_bytes, chunks_of="plan.json")


def test_the_bound_is_said_with_the_measurement_that_is_worth_most(plan: Plan) -> None:
    predicted = plan.predicted
    judged = tuple(
        replace(each, step_s=each.best_s * (1 + 0.3 * (each.scenario.link < 1))) for each in predicted.judgements
    )
    shown = replace(
        plan, predicted=replace(predicted, judgements=judged, regret_if_known={"link": 0.02, "clipped": 0.3})
    )
    text = str(shown)
    assert "costs at most 30 % against the plan you would pick if you knew that links are slow" in text
    assert "0 % if every step is clipped" in text
    assert "measuring the machine (`elixir hardware --measure`) would leave 2 %" in text
    measured = replace(shown, hardware_name="mine")
    assert "a run that uses the links (`elixir hardware --learn`) would leave 2 %" in str(measured)
    known = {"link": max(each.regret for each in judged) - NOTICEABLE_REGRET}
    assert "would leave" not in str(replace(shown, predicted=replace(shown.predicted, regret_if_known=known)))
    assert str(Scenario(0.3, 1.0, True)) == "CPU Adam is slow and every step is clipped"


def test_a_plan_in_python_is_short(plan: Plan, stack: StepTrace) -> None:
    answer = Answer.of(plan, stack, MACHINE)
    tiny = stack_trace(StackShape(64, 1, 256, 200, 128))
    levers = Answer.of(planned(tiny, GIB, placement="cuda"), tiny, MACHINE).levers()
    assert levers
    for shown in (plan, answer, *levers):
        assert len(repr(shown)) < 200
        assert "\n" not in repr(shown)
    assert len(plan.summary().splitlines()) == 3


def test_recorded_regrets_keep_their_bars() -> None:
    with (regret.POOL.parent / "results" / "regret.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    newest = [row for row in rows if row["date"] == rows[-1]["date"] and row["situation"] in regret.CHOSEN]
    assert {row["situation"] for row in newest} == set(regret.CHOSEN)
    numbers = ("regret_percent", "least_percent")
    assert regret.missed([row | {name: float(row[name]) for name in numbers} for row in newest]) == []
    assert all(regret.pooled(name) for name in regret.CHOSEN)
