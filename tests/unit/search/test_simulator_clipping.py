"""Clipping in a simulated step: gradients are read for their norm where the runtime reads them, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elixir.errors import InputTypeError
from elixir.hardware.rate_fit import RateFit
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.simulator.simulation import Simulation, simulate_step
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
