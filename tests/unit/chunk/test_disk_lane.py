"""States on a disk: what a plan says of them, the memory they take and save, and the lane that moves them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from elixir.errors import ArtifactError, InputError
from elixir.hardware.profile import preset
from elixir.hardware.rate_fit import RateFit
from elixir.plan.plan import Plan
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import explain
from tests.common.chains import NUMEL, ON_DISK_BYTES, Speeds, chain, chain_plan, simulated, updating_early

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


def test_updates_of_states_in_memory_do_not_wait_for_the_disk() -> None:
    """But for their turn: updates run in the order in which forward asks for the chunks."""
    speeds = Speeds(1.0, adam=2.0, read=10.0, write=7.0)
    behind = simulated(chain_plan(blocks=3, depth=0, homes="ssk"), speeds)
    updates = [span.start_s for span in behind.timeline if span.name == "update"]
    assert updates == pytest.approx([0.0, 2.0, 10.0])


def test_weights_on_the_device_return_there_during_the_next_update() -> None:
    use, fetch, adam, read = 1.0, 0.5, 10.0, 4.0
    result = simulated(chain_plan(blocks=0, depth=0, homes="eee"), Speeds(use, fetch, adam=adam, read=read))
    assert result.step_s == pytest.approx(read + 3 * adam + fetch + 4 * use)


@pytest.mark.parametrize("write", [1.0, 20.0])
@pytest.mark.parametrize("homes", ["kskks", "sskss"])
def test_new_states_in_backward_move_the_same_bytes_in_every_step(homes: str, write: float) -> None:
    speeds = Speeds(4.0, 0.5, 0.25, 3.0, 1.0, 0.0, 2.0, write)
    late = chain_plan(blocks=5, depth=0, homes=homes)
    plan = updating_early(late, *(index for index, home in enumerate(homes) if home == "s"))
    assert simulated(plan, speeds).moved_bytes == simulated(late, speeds).moved_bytes
    second, third, tenth = (simulated(plan, speeds, steps=steps) for steps in (3, 4, 10))
    assert second == third == tenth


def test_ranks_of_one_machine_share_its_disk() -> None:
    speeds, latency = Speeds(1.0, read=4.0, write=3.0).machine(), 0.5
    plan = chain_plan(blocks=3, depth=0, homes="kkk", world_size=2)
    together, apart = (simulate_step(plan, chain(), speeds, ranks_per_host=ranks) for ranks in (2, 1))
    assert together.busy_s["disk"] == pytest.approx(3 * (4.0 + 3.0))
    assert apart.busy_s["disk"] == pytest.approx(3 * (4.0 + 3.0) / 2)
    fits = {"disk_read": RateFit(latency, ON_DISK_BYTES / 8.0, 0.0)}
    fitted = simulate_step(plan, chain(), replace(speeds, fits=fits), ranks_per_host=1)
    assert fitted.busy_s["disk"] == pytest.approx(3 * (latency + 4.0 + 1.5))


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("homes", "window"), [("kss", 1), ("kks", 2), ("kkk", 3), ("eee", 3), ("sss", 0)])
def test_the_disk_holds_masters_and_states_and_the_host_a_window_of_three(homes: str, window: int) -> None:
    """fp32: 4 B of weights, 4 B of gradients and 8 B of states an element; on the disk also a master of 4 B."""
    predicted = chain_plan(blocks=0 if homes == "eee" else 3, depth=0, homes=homes).predicted
    on_disk, in_memory = homes.count("k") + homes.count("e"), homes.count("s")
    assert predicted.disk_peak_bytes == on_disk * 12 * NUMEL
    parts = {"weights": 0 if homes == "eee" else 12 * NUMEL, "optimizer_states": in_memory * 8 * NUMEL}
    parts |= {"gradients": 12 * NUMEL} | ({"state_window": window * 12 * NUMEL} if window else {})
    parts |= {"checkpoint": 2 * 12 * NUMEL}
    assert predicted.host_parts == parts
    assert predicted.moved_bytes["disk_read"] == predicted.moved_bytes["disk_write"] == on_disk * 12 * NUMEL


def test_all_ranks_of_a_machine_count_on_its_disk() -> None:
    pair = chain_plan(blocks=3, depth=0, homes="kkk", world_size=2).predicted
    assert pair.disk_peak_bytes == 3 * ON_DISK_BYTES
    assert pair.moved_bytes["disk_read"] == 3 * ON_DISK_BYTES // 2
    assert pair.host_parts["state_window"] == 3 * ON_DISK_BYTES


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


def test_explain_knows_the_disk_where_the_plan_may_use_it() -> None:
    machine = Speeds(1.0, 0.5, 0.25, 3.0, read=2.0, write=2.0).machine()
    found = explain(chain_plan(blocks=3, depth=0, homes="kss"), chain(), machine, levers=False)
    spots = [{str(other.spot) for other in chunk.elsewhere} for chunk in found.chunks]
    assert found.chunks[0].spot.states == "disk"
    assert "weights streamed from the host, states on the host" in spots[0]
    assert "weights streamed from the host, states on the disk" in spots[1]
    back = next(o.change for o in found.chunks[0].elsewhere if o.spot.weights == "host" and o.spot.states == "host")
    assert back.change_s < 0
    # Its states and no window any more.
    assert back.host_change_bytes == 8 * NUMEL - 12 * NUMEL
    without = replace(chain_plan(blocks=3, depth=0, homes="sss"), disk_budget_bytes=0)
    assert not any(
        other.spot.states == "disk"
        for chunk in explain(without, chain(), machine, levers=False).chunks
        for other in chunk.elsewhere
    )


# --- the machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "fast"])
@pytest.mark.parametrize("name", ["disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_free_bytes"])
def test_a_speed_or_size_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        dataclasses.replace(preset("h200"), **{name: value})  # type: ignore[arg-type]


def test_a_machine_whose_disk_is_unknown_says_what_to_do() -> None:
    unknown = replace(Speeds().machine(), disk_read_bytes_per_s=None)
    assert not unknown.knows_disk
    assert unknown.rate("disk_write").per_s > 0
    with pytest.raises(InputError, match="--disk-folder"):
        unknown.rate("disk_read")
    with pytest.raises(InputError, match="'disk_read_bytes_per_s'"):
        simulate_step(chain_plan(blocks=3, depth=0, homes="kkk"), chain(), unknown)
    # Plans without it need not know.
    assert simulate_step(chain_plan(blocks=3, depth=0), chain(), unknown).busy_s["disk"] == 0
