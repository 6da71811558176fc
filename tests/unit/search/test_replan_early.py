"""A second plan after steps whose early states were discarded: the host is not taken for slow, and none are planned."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.replan import EarlyShares, Observation, calibrated, correct, simulated_s
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from tests.common.observed import steady
from tests.common.synthetic_trace import StackShape, stack_trace

Planned = tuple[StepTrace, HardwareProfile, Plan]
KEPT, DISCARDED, NOT_MADE = EarlyShares(), EarlyShares(made=1.0, run=1.0, kept=0.0), EarlyShares(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def planned() -> Planned:
    """Everything fits the device, and the host makes states during backward, since that is free."""
    trace, machine = stack_trace(StackShape(1024, 6, 4096, 5000, 512), batch=2, seq=512), preset("h200")
    plan = plan_from_trace(trace, machine, 1, host_budget="64GiB", early_updates=True, assume="nominal").plan
    assert any(chunk.home.early for chunk in plan.chunks)
    return trace, machine, plan


def after_norm(plan: Plan) -> Plan:
    return replace(plan, chunks=tuple(replace(chunk, update="after_norm") for chunk in plan.chunks))


def run_of(planned: Planned, early: EarlyShares) -> Observation:
    """The observation of a simulated run of the plan on the very machine that it was made for."""
    trace, machine, plan = planned
    step = simulate_step(after_norm(plan) if early.made == 0 else plan, trace, machine, clipped=early.kept == 0)
    busy = {"fetch": 0.0, "offload": 0.0, "refresh": 0.0, "host_adam": step.busy_s["host_adam"]}
    return steady(plan, step_s=step.step_s, busy_s=busy, early=early)


@pytest.mark.parametrize("early", [KEPT, DISCARDED, NOT_MADE])
def test_the_machine_is_as_fast_as_it_is(planned: Planned, early: EarlyShares) -> None:
    trace, machine, plan = planned
    seen = run_of(planned, early)
    found, compute = calibrated(trace, machine, plan, seen)
    assert found.host_adam_numel_per_s == pytest.approx(machine.host_adam_numel_per_s, rel=1e-3)
    assert compute == pytest.approx(1.0, rel=1e-6)
    assert simulated_s(plan, trace, found, seen, compute_scale=compute) == pytest.approx(seen.step_s, rel=1e-6)
    for step_s, least_or_most in ((1e-12, 1e-4), (1e12, 1e4)):
        assert calibrated(trace, machine, plan, replace(seen, step_s=step_s))[1] == least_or_most
    for step_s in (0.0, math.inf):
        with pytest.raises(InputError, match="must take a finite time above 0 s"):
            calibrated(trace, machine, plan, replace(seen, step_s=step_s))


@pytest.mark.parametrize("slower", [1.0, 3.0, 30.0])
def test_a_slow_host_begins_no_update_that_was_discarded(planned: Planned, slower: float) -> None:
    trace, machine, plan = planned
    slow = replace(machine, host_adam_numel_per_s=machine.host_adam_numel_per_s / slower)
    step = simulate_step(plan, trace, slow, clipped=True)
    work = sorted((span.start_s, span.end_s) for span in step.timeline if span.resource == "host_adam")
    assert all(end_s <= start_s * (1 + 1e-9) for (_, end_s), (start_s, _) in pairwise(work))
    assert step.busy_s["host_adam"] == pytest.approx(sum(end_s - start_s for start_s, end_s in work))
    assert step.busy_s["host_adam"] <= step.step_s


def test_a_run_that_keeps_all_stays(planned: Planned) -> None:
    trace, machine, plan = planned
    found = correct(trace, machine, plan, [run_of(planned, KEPT)], plan.optimizer)
    assert found.plan is None
    assert "were kept" not in found.reason
