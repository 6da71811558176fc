"""The simulator does what the runtime does, adds up as arithmetic by hand does, and never gets slower by a faster
part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir.errors import InputError
from elixir.search.simulator.simulation import simulate_step
from elixir.tracer.trace import trace_step
from elixir.units import MIB
from tests.common.chains import Speeds, chain, chain_plan, simulated, updating_early
from tests.common.parity import Pair, case, make_plan
from tests.common.submitted import simulated_events, watching


def test_without_prefetch_every_fetch_stands_in_the_way() -> None:
    """One block: three fetches in forward, two in backward (the last chunk is still there), one offload at the end."""
    use, fetch, offload = 1.0, 0.5, 0.25
    result = simulated(chain_plan(blocks=1, depth=0), Speeds(use, fetch, offload))
    assert result.step_s == pytest.approx(5 * fetch + 6 * use + offload)
    assert result.phases_s == pytest.approx(
        {"forward": 3 * (fetch + use), "backward": 2 * fetch + 3 * use, "optimizer": offload}
    )
    assert result.waited_s["host_to_device"] == pytest.approx(5 * fetch)
    assert result.busy_s["device_to_host"] == pytest.approx(3 * offload)
    assert result.loads == 5
    assert result.bound_by == "compute"


def test_prefetch_hides_every_fetch_but_the_first() -> None:
    use, fetch, offload = 1.0, 0.5, 0.25
    result = simulated(chain_plan(blocks=3, depth=1), Speeds(use, fetch, offload))
    assert result.step_s == pytest.approx(fetch + 6 * use + offload)


def test_updates_reach_into_forward_and_a_fetch_waits_for_its_own_only() -> None:
    use, fetch, offload, adam = 1.0, 0.5, 0.25, 10.0
    speeds = Speeds(use, fetch, offload, adam)
    for depth in (0, 1):
        result = simulated(chain_plan(blocks=3, depth=depth), speeds)
        assert result.step_s == pytest.approx(3 * adam + fetch + 4 * use + offload)
        assert result.bound_by == "host_adam"
    first = simulated(chain_plan(blocks=3, depth=0), speeds, steps=1)
    assert first.step_s == pytest.approx(3 * fetch + 6 * use + offload)


def test_accumulation_fetches_once_where_blocks_last_and_updates_once() -> None:
    use, fetch, offload, adam = 1.0, 0.5, 0.25, 10.0
    plan = chain_plan(blocks=3, depth=0)
    result = simulated(plan, Speeds(use, fetch, offload, adam), accumulation=3)
    assert result.step_s == pytest.approx(3 * adam + fetch + use + 3 * use + 12 * use + offload)
    assert result.loads == 3
    assert result.moved_bytes["device_to_host"] == 9 * MIB
    # With one block, what the last batch left is still there: forward loads all three, and then two for backward.
    tight = simulated(chain_plan(blocks=1, depth=0), Speeds(use, fetch, offload), accumulation=2)
    assert tight.loads == 5 + 4


@pytest.mark.parametrize(("adam", "fetch", "bound"), [(10.0, 0.5, "host_adam"), (0.5, 10.0, "refresh")])
def test_resident_chunks_wait_for_their_weights_to_return(adam: float, fetch: float, bound: str) -> None:
    """One chunk leaves while the host steps the next, so only the slower of the two adds up."""
    use, offload = 1.0, 0.25
    result = simulated(chain_plan(blocks=0, depth=0, homes="hhh"), Speeds(use, fetch, offload, adam))
    assert result.step_s == pytest.approx(2 * max(adam, fetch) + adam + fetch + 4 * use + offload)
    assert result.bound_by == bound
    assert result.waited_s["refresh"] == pytest.approx(result.step_s - 6 * use - offload)
    moved = {link: amount for link, amount in result.moved_bytes.items() if amount}
    assert moved == {"host_to_device": 3 * MIB, "device_to_host": 3 * MIB}


@pytest.mark.parametrize(("kind", "forward_s"), [("cuda", 4 * 4.0 + 1.0), ("cpu", 2 * 4.0 + 3.0)])
def test_the_link_carries_fetches_and_returning_weights_in_the_order_of_their_use(kind: str, forward_s: float) -> None:
    """Two chunks are fetched, and two that were updated early return meanwhile. On a CPU there is no link."""
    plan = updating_early(chain_plan(blocks=2, depth=1, homes="sshh"), 2, 3)
    assert simulated(plan, Speeds(1.0, 4.0), kind=kind).phases_s["forward"] == pytest.approx(forward_s)


def test_what_the_device_steps_is_stepped_before_the_next_forward() -> None:
    result = simulated(chain_plan(blocks=0, depth=0, homes="ddd"), Speeds(use=1.0, device_adam=0.25))
    assert result.step_s == pytest.approx(6 + 3 * 0.25)
    assert result.phases_s["optimizer"] == pytest.approx(3 * 0.25)
    assert result.bound_by == "compute"


def test_calibration_scales_compute_alone() -> None:
    plan, speeds = chain_plan(blocks=1, depth=0), Speeds(1.0, 0.5, 0.25)
    result = simulated(plan, speeds, compute_scale=2.0)
    assert result.step_s == pytest.approx(5 * 0.5 + 12 + 0.25)
    with pytest.raises(InputError, match="compute_scale"):
        simulated(plan, speeds, compute_scale=0.0)


# --- the runtime ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("family", "mode", "blocks"),
    [("opt", "streamed", 0.01), ("opt", "mixed", 0.6), ("t5", "mixed", 0.01), ("t5", "streamed", 0.6)],
)
def test_events_come_in_the_order_of_the_runtime(family: str, mode: str, blocks: float) -> None:
    """Loads, gradient blocks opened, and gradients sent, as the runtime's own methods are called."""
    model = case(family)
    plan = make_plan(model, mode, allocate_factor=blocks)
    trace = trace_step(
        model.model,
        model.inp,
        lambda m, inp: model.loss(m, inp).backward(),
        hardware=Speeds().machine(),
        optimizer=None,
    )
    with Pair(model, plan) as pair:
        pair.train(1)
        with watching() as seen:
            pair.backward()
    assert seen == simulated_events(plan, trace, Speeds().machine())


# --- properties ----------------------------------------------------------------------------------------------------


RATES = (
    "host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "device_to_device_bytes_per_s", "host_adam_numel_per_s",
    "device_adam_numel_per_s", "device_memory_bytes_per_s", "host_memory_bytes_per_s", "matmul_efficiency",
    "disk_read_bytes_per_s", "disk_write_bytes_per_s",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    homes=st.text("shdwke", min_size=1, max_size=6),
    world_size=st.sampled_from([1, 2]),
    spare=st.integers(0, 3),
    depth=st.integers(0, 2),
    accumulation=st.integers(1, 2),
    early=st.booleans(),
    kind=st.sampled_from(["cpu", "cuda"]),
    speeds=st.tuples(*[st.floats(0.01, 10.0)] * 8),
    faster=st.sampled_from(RATES),
    factor=st.floats(1.0, 10.0),
)
def test_nothing_gets_slower_by_what_gets_faster(
    homes: str,
    world_size: int,
    spare: int,
    depth: int,
    accumulation: int,
    early: bool,
    kind: str,
    speeds: tuple[float, ...],
    faster: str,
    factor: float,
) -> None:
    """This holds with prefetch: the plan fixes the order of work on every lane, so nothing starts later."""
    streamed = sum(home in "swk" for home in homes)
    depth = min(depth, max(streamed - 1, 0))
    blocks = min(1 + depth + spare, streamed)
    plan = chain_plan(blocks=blocks, depth=depth, homes=homes, world_size=world_size)
    if early:
        plan = updating_early(plan, *(index for index, home in enumerate(homes) if home in "shw"))
    machine = replace(Speeds(*speeds).machine(kind), matmul_efficiency=0.1, device_memory_bytes_per_s=1e9)
    quicker = replace(machine, **{faster: getattr(machine, faster) * factor})
    options: dict[str, Any] = {"accumulation": accumulation}
    before, after = (simulate_step(plan, chain(len(homes)), it, **options).step_s for it in (machine, quicker))
    assert after <= before * (1 + 1e-12)
