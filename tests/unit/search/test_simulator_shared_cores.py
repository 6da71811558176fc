"""A CPU as the device: what its lanes do takes time from compute, unless compute waits for them anyway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.search.simulator.simulation import Simulation, simulate_step
from tests.common.chains import Speeds, chain, chain_plan


def step(speeds: Speeds, contention: float | None, homes: str = "sss") -> Simulation:
    machine = replace(speeds.machine("cpu"), contention=contention)
    plan = chain_plan(blocks=2 if "s" in homes else 0, depth=1 if "s" in homes else 0, homes=homes)
    return simulate_step(plan, chain(), machine, ranks_per_host=1)


def test_compute_that_waits_for_a_lane_loses_nothing_by_it() -> None:
    """CPU Adam of all chunks takes far longer than forward, so the step is as long as that."""
    speeds = Speeds(use=0.5, adam=20.0)
    alone, sharing = step(speeds, None), step(speeds, 0.5)
    assert sharing.step_s < 1.1 * alone.step_s
    assert sharing.busy_s["compute"] > alone.busy_s["compute"] + 0.4 * sharing.busy_s["host_adam"]


@pytest.mark.parametrize("adam", [0.1, 1.0, 10.0])
def test_more_contention_never_makes_a_step_shorter(adam: float) -> None:
    found = [step(Speeds(use=2.0, adam=adam), share).step_s for share in (0.0, 0.1, 0.5, 1.0, 1.5)]
    assert found == sorted(found)
