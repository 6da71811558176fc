"""A hedge buys a better worst case with seconds of a step, is kept in a plan, and is advised where it is worth it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elixir.errors import InputError, InputTypeError
from elixir.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.advice import hedging
from elixir.search.request import SearchRequest
from elixir.search.simulator import simulate_step, worst_case
from elixir.search.whatif.bottlenecks import request_of
from elixir.show.tables import hedge_line
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.searching import HARDWARE
from tests.common.synthetic_trace import StackShape, stack_trace

STACK = StackShape(hidden=256, layers=12, ffn=1024, vocab=1024, positions=256)
MACHINE = replace(HARDWARE, flops_per_s={"bfloat16": 2e12, "float16": 2e12}, host_adam_numel_per_s=8e8)
"""CPU Adam is done before the step is, but not if it takes three times as long."""


@pytest.fixture(scope="module")
def stack() -> StepTrace:
    return stack_trace(STACK, batch=2, seq=256)


@pytest.fixture(scope="module")
def short_bytes(stack: StepTrace) -> int:
    """Memory of a device that is too small for all states."""
    whole = plan_from_trace(stack, MACHINE, 1, device_memory=1 << 40, host_memory=64 * GIB, placement="cuda")
    return int(0.6 * whole.predicted.device_peak_bytes)


def planned(trace: StepTrace, device_memory: int, **options: Any) -> Plan:
    return plan_from_trace(trace, MACHINE, 1, device_memory=device_memory, host_memory=64 * GIB, **options)


def worst_s(plan: Plan, trace: StepTrace) -> float:
    return simulate_step(plan, trace, worst_case(MACHINE)).step_s


def test_a_hedge_shortens_the_step_on_a_slow_host_and_costs_no_more_than_it_says(
    stack: StepTrace, short_bytes: int
) -> None:
    plain, hedged = planned(stack, short_bytes), planned(stack, short_bytes, hedge=0.05)
    assert worst_s(hedged, stack) < 0.9 * worst_s(plain, stack)
    assert hedged.predicted.fastest_s == plain.predicted.fastest_s
    for plan, hedge in ((plain, 0.01), (hedged, 0.05)):
        assert plan.predicted.fastest_s is not None
        assert plan.predicted.step_s <= (1 + hedge) * plan.predicted.fastest_s
        assert plan.hedge == hedge
        assert request_of(plan, MACHINE).hedge == hedge
        assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_says_which_hedge_is_worth_it_and_that_hedge_gives_what_it_says(
    stack: StepTrace, short_bytes: int
) -> None:
    plain = planned(stack, short_bytes)
    advice = plain.better_hedge()
    assert advice.unhedged_worst_s == worst_s(plain, stack)
    hedged = planned(stack, short_bytes, hedge=advice.hedge)
    assert (hedged.predicted.step_s, worst_s(hedged, stack)) == (advice.step_s, advice.worst_s)
    assert advice.worst_s <= 0.9 * advice.unhedged_worst_s
    assert f"--hedge {advice.hedge:g} makes that " in hedge_line(plain, advice)
    assert hedged.better_hedge() is None


@pytest.mark.parametrize(("share", "said"), [(0.94, True), (0.96, False)])
def test_an_estimate_a_little_too_long_hides_no_hedge(
    stack: StepTrace, short_bytes: int, monkeypatch: pytest.MonkeyPatch, share: float, said: bool
) -> None:
    """One packing is estimated before any plan is made; others may do better."""
    monkeypatch.setattr(hedging._OnSlowHost, "fullest_s", lambda slow: share * slow.step_s)
    assert (planned(stack, short_bytes).better_hedge() is not None) == said


def test_nothing_is_said_of_plans_that_no_host_can_hurt(stack: StepTrace, short_bytes: int) -> None:
    assert planned(stack, 1 << 40).better_hedge() is None  # there is room for all states on the device
    assert planned(stack, short_bytes, placement="cpu").better_hedge() is None  # the user has decided
    with pytest.raises(InputError, match=r"better_hedge\(\) needs the step and the machine"):
        Plan.from_json(planned(stack, 1 << 40).to_json()).better_hedge()


def test_a_hedge_is_a_share() -> None:
    for wrong in (-0.1, 15, float("nan")):
        with pytest.raises(InputError, match="hedge must be a share of a step from 0 to 1, such as 0.15 for 15 %"):
            SearchRequest(world_size=1, hedge=wrong)
    with pytest.raises(InputTypeError, match="hedge must be a number, got True"):
        SearchRequest(world_size=1, hedge=True)
