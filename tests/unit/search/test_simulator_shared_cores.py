"""A CPU as the device: what its lanes do takes time from compute, unless compute waits for them anyway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.errors import InputError
from elixir.search.simulator.simulation import Simulation, simulate_step
from tests.common.chains import Speeds, chain, chain_plan

LANES = ("host_to_device", "device_to_host", "network", "host_adam", "refresh")


def step(speeds: Speeds, contention: float | None, homes: str = "sss") -> Simulation:
    machine = replace(speeds.machine("cpu"), contention=contention)
    plan = chain_plan(blocks=2 if "s" in homes else 0, depth=1 if "s" in homes else 0, homes=homes)
    return simulate_step(plan, chain(), machine, ranks_per_host=1)


def test_compute_loses_its_share_of_every_second_of_the_lanes() -> None:
    """Lanes are so fast that compute never waits long for them."""
    speeds = Speeds(use=8.0, fetch=0.5, offload=0.5, adam=0.25)
    alone, sharing = step(speeds, None), step(speeds, 0.5)
    lanes_s = sum(sharing.busy_s[lane] for lane in LANES)
    assert lanes_s == pytest.approx(sum(alone.busy_s[lane] for lane in LANES))
    assert sharing.busy_s["compute"] - alone.busy_s["compute"] == pytest.approx(0.5 * lanes_s)
    waited_s = sum(alone.waited_s.values())
    assert 0.5 * lanes_s - waited_s <= sharing.step_s - alone.step_s <= 0.5 * lanes_s


def test_parts_still_sum_to_the_step() -> None:
    found = step(Speeds(use=2.0, adam=3.0), 0.5)
    assert sum(found.phases_s.values()) == pytest.approx(found.step_s)
    assert found.busy_s["compute"] + sum(found.waited_s.values()) == pytest.approx(found.step_s)
    assert sum(found.critical_s.values()) == pytest.approx(found.step_s)


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


def test_nothing_is_lost_where_everything_is_on_the_device() -> None:
    speeds = Speeds(use=8.0, adam=1.0)
    assert step(speeds, 0.5, homes="ddd").step_s == pytest.approx(step(speeds, None, homes="ddd").step_s, rel=0.1)


def test_a_contention_below_0_is_refused() -> None:
    with pytest.raises(InputError, match="'contention' must be finite and at least 0"):
        replace(Speeds(use=1.0).machine("cpu"), contention=-0.1)
