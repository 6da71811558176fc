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


def test_a_slow_disk_takes_one_transfer_after_the_other_in_the_order_of_the_plan() -> None:
    """Three are read ahead, then a write makes room for each read. Each update is done with its reading, a fetch with
    its update."""
    use, adam, read, write = 1.0, 2.0, 10.0, 7.0
    result = simulated(chain_plan(blocks=4, depth=0, homes="kkkk"), Speeds(use, adam=adam, read=read, write=write))
    spans = [(span.name, span.chunk, span.start_s) for span in result.timeline if span.resource == "disk"]
    assert spans == [
        ("read", 0, 0.0), ("read", 1, 10.0), ("read", 2, 20.0), ("write", 0, 30.0), ("read", 3, 37.0), ("write", 1, 47.0),
        ("write", 2, 54.0), ("write", 3, 61.0),
    ]  # fmt: skip
    used = {span.chunk: span.start_s for span in result.timeline if span.name == "forward"}
    assert used == pytest.approx({0: 10 + adam, 1: 20 + adam, 2: 30 + adam, 3: 47 + adam})
    # Compute is over before the last states are back on the disk, after which the next step begins.
    assert result.step_s == pytest.approx(68.0)
    assert result.waited_s["disk"] == pytest.approx(68.0 - (49 + 5 * use))
    assert result.bound_by == "disk"
    assert result.phases_s["optimizer"] == pytest.approx(result.waited_s["disk"])


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
