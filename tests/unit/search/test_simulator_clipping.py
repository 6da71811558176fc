"""Clipping in a simulated step: gradients are read for their norm where the runtime reads them, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elixir.hardware.rate_fit import RateFit
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.units import MIB
from tests.common.chains import Speeds, chain, chain_plan

READ_S, NUMBER_S = 0.125, 0.03125
"""Seconds of one chunk in the device's memory, and of one number on its way to the host."""


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
