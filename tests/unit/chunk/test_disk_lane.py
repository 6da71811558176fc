"""States on a disk: what a plan says of them, the memory they take and save, and the lane that moves them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.errors import ArtifactError, InputError
from elixir.plan.plan import Plan
from tests.common.chains import ON_DISK_BYTES, Speeds, chain_plan, simulated

# --- the lane ------------------------------------------------------------------------------------------------------


def test_adam_of_one_chunk_runs_while_the_next_is_read() -> None:
    """Only the first chunk's reading is waited for: the disk is faster than Adam, and two buffers are enough."""
    use, fetch, offload, adam = 1.0, 0.5, 0.25, 10.0
    result = simulated(
        chain_plan(blocks=3, depth=0, homes="kkk"), Speeds(use, fetch, offload, adam, read=4.0, write=3.0)
    )
    assert result.step_s == pytest.approx(4.0 + 3 * adam + fetch + 4 * use + offload)
    assert result.bound_by == "host_adam"
    assert result.busy_s["disk"] == pytest.approx(3 * (4.0 + 3.0))
    assert result.moved_bytes["disk_read"] == result.moved_bytes["disk_write"] == 3 * ON_DISK_BYTES


# --- memory --------------------------------------------------------------------------------------------------------


# --- the plan ------------------------------------------------------------------------------------------------------


def test_what_no_plan_can_be_is_refused() -> None:
    plan = chain_plan(blocks=3, depth=0, homes="kks")
    with pytest.raises(InputError, match="state_home"):
        replace(plan.chunks[0], trainable=False)
    with pytest.raises(InputError, match="disk_peak_bytes"):
        replace(plan.predicted, disk_peak_bytes=-1)
    with pytest.raises(InputError, match="disk_budget_bytes"):
        replace(plan, disk_budget_bytes=-1)
    data = plan.to_dict()
    data["chunks"][0]["weight_home"] = "disk"
    with pytest.raises(ArtifactError, match=r"chunks\[0\].weight_home"):
        Plan.from_dict(data)


# --- the machine ---------------------------------------------------------------------------------------------------
