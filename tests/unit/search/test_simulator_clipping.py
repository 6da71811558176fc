"""Clipping in a simulated step: gradients are read for their norm where the runtime reads them, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elixir.errors import InputTypeError
from elixir.hardware.rate_fit import RateFit
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.problem.from_plan import setting_of
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.show.tables import record_of
from elixir.step_trace import StepTrace
from elixir.units import GIB, MIB
from tests.common.chains import Speeds, chain, chain_plan
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import StackShape, stack_trace

READ_S, NUMBER_S = 0.125, 0.03125
"""Seconds of one chunk in the device's memory, and of one number on its way to the host."""
HARDWARE = make_hardware()


def steps(kind: str, *, world_size: int = 1, homes: str = "hhd", **options: Any) -> tuple[Simulation, Simulation]:
    """Steps of one plan, without clipping and with it."""
    blocks = 3 if "h" in homes else None
    plan = chain_plan(blocks=0, depth=0, homes=homes, world_size=world_size, grad_blocks=blocks)
    machine = replace(
        Speeds(use=8.0, adam=1.0).machine(kind),
        device_memory_bytes_per_s=MIB / READ_S,
        fits={"device_to_host": RateFit(NUMBER_S, 1e30, 0.0)},
    )
    found = [
        simulate_step(replace(plan, clipping=clips), chain(), machine, ranks_per_host=1, **options)
        for clips in (False, True)
    ]
    return found[0], found[1]


def length_s(step: Simulation, name: str) -> float:
    return sum(span.end_s - span.start_s for span in step.timeline if span.name == name)


def test_on_a_cpu_the_lane_reads_what_it_moves_and_numbers_need_no_way() -> None:
    plain, clipped = steps("cpu", homes="hhh")
    assert length_s(clipped, "offload") - length_s(plain, "offload") == pytest.approx(3 * READ_S)
    assert length_s(clipped, "norm") == 0.0


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [1, 4])
def test_the_search_sees_what_simulate_step_gives(world_size: int) -> None:
    """Clipping never makes a step faster; sums of parts hold with it."""
    trace = _stack()
    seconds = []
    for clips in (False, True):
        plan = _planned(trace, world_size, clipping=clips)
        step = simulate_step(plan, trace, HARDWARE)
        assert plan.clipping is setting_of(plan, 1, "cuda").clipping is record_of(plan)["clipping"] is clips
        assert ("without clipping" in str(plan)) is not clips
        assert plan.predicted.seconds["total"] == pytest.approx(step.step_s, rel=1e-12)
        for sums in (step.phases_s, step.critical_s):
            assert sum(sums.values()) == pytest.approx(step.step_s)
        assert step.busy_s["compute"] + sum(step.waited_s.values()) == pytest.approx(step.step_s)
        assert simulate_step(replace(plan, clipping=True), trace, HARDWARE).step_s >= step.step_s
        seconds.append(step.step_s)
    assert seconds[0] < seconds[1]


def _stack(**options: Any) -> StepTrace:
    return stack_trace(StackShape(hidden=256, layers=4, ffn=1024, vocab=1024, positions=64), batch=2, seq=64, **options)


def _planned(trace: StepTrace, world_size: int = 1, **options: Any) -> Plan:
    return plan_from_trace(trace, HARDWARE, world_size, device_memory=GIB, host_budget=GIB, **options).plan


def test_plans_count_clipping_unless_told_otherwise() -> None:
    trace = _stack()
    assert _planned(trace).clipping
    assert not _planned(trace, clipping=False).clipping
    with pytest.raises(InputTypeError, match="clipping must be"):
        _planned(trace, clipping=1.0)
