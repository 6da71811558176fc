"""Searches that may use a disk: when they do, which states go there, and what is said where it would help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.certificate.lower_bound import lower_bound
from elixir.errors import PlanError
from elixir.optimizer_states import StateSize
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.problem.placement import Setting
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.units import GIB, MIB
from tests.common.searching import HARDWARE, check_consistent, shortage, traces
from tests.common.synthetic_trace import StackShape, stack_trace

FAST = replace(HARDWARE, disk_read_bytes_per_s=6e9, disk_write_bytes_per_s=3e9)
SMALL = StackShape(hidden=256, layers=8, ffn=1024, vocab=1024, positions=256)


@pytest.fixture(scope="module")
def stack() -> StepTrace:
    return stack_trace(SMALL, batch=2, seq=256)


@pytest.fixture(scope="module")
def limits(stack: StepTrace) -> tuple[int, int]:
    """A device that holds little more than it must, and the host bytes that are needed with it."""
    least = plan_from_trace(
        stack, FAST, 1, device_memory=1 << 40, placement="cpu", assume="nominal"
    ).predicted.device_peak_bytes
    device = int(0.7 * least)
    return device, shortage(stack, FAST, 1, device_memory=device, host_budget=1).needed_bytes


def searched(stack: StepTrace, device: int, host: int, **options: object) -> Plan:
    budgets = {"device_memory": device, "host_budget": host, "assume": "nominal"}
    return plan_from_trace(stack, FAST, 1, **budgets | options).plan  # type: ignore[arg-type]


_PLANS: dict[tuple[object, ...], tuple[StepTrace, Plan]] = {}


def planned(stack: StepTrace, device: int, host: int, **options: object) -> Plan:
    """Several tests ask for the same plan."""
    key = (id(stack), device, host, *sorted(options.items()))
    if key not in _PLANS:
        _PLANS[key] = stack, searched(stack, device, host, **options)
    return _PLANS[key][1]


def test_states_go_to_the_disk_only_where_nothing_fits_without(stack: StepTrace, limits: tuple[int, int]) -> None:
    device, host = limits
    enough = planned(stack, device, host)
    assert replace(planned(stack, device, host, disk_memory="1GiB"), disk_budget_bytes=0) == enough
    assert shortage(stack, FAST, 1, device_memory=device, host_budget=host - 1).needed_bytes == host
    short = planned(stack, device, int(0.8 * host), disk_memory="1GiB")
    predicted = short.predicted
    assert short.uses_disk
    assert short.disk_budget_bytes == GIB
    assert predicted.host_peak_bytes <= 0.8 * host
    assert predicted.device_peak_bytes <= device
    assert 0 < predicted.disk_peak_bytes <= GIB
    assert simulate_step(short, stack, FAST).step_s == predicted.seconds["total"]
    assert short == searched(stack, device, int(0.8 * host), disk_memory=1 << 30)
    assert sum(chunk.state_home == "disk" for chunk in short.chunks) > 3, "there are more than the window holds"
    check_consistent(short, stack)


# --- which states --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    trace=traces(), world_size=st.sampled_from([1, 2]), share=st.floats(0.3, 0.99), disk=st.sampled_from([1, 200, 4000])
)
def test_plans_with_a_disk_are_what_an_independent_count_says(
    trace: StepTrace, world_size: int, share: float, disk: int
) -> None:
    """And no faster than the bound."""
    cpu: dict[str, Any] = {"device_memory": 1 << 40, "placement": "cpu"}
    host = int(share * shortage(trace, FAST, world_size, host_budget=1, **cpu).needed_bytes)
    try:
        made = plan_from_trace(trace, FAST, world_size, host_budget=host, disk_memory=disk * MIB, **cpu).plan
    except PlanError:
        return  # `needed_bytes` is held by another test
    check_consistent(made, trace)
    space = SearchSpace(trace, FAST, Setting(world_size, FAST.ranks_per_host(world_size), StateSize(8), made.overlap))
    bound = lower_bound(space, Budgets(1 << 40, host, disk * MIB))
    assert bound is not None
    assert bound.step_s <= made.predicted.seconds["total"]


# --- advice --------------------------------------------------------------------------------------------------------
