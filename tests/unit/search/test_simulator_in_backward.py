"""Updates on the host that begin in backward, by hand-made seconds; and what holds for them whatever the plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir.search.planner import to_plan
from elixir.search.propose import Budgets, SearchSpace, weigh
from elixir.search.simulator import RESOURCES, simulate_step, worth_stepping
from tests.common.chains import Speeds, chain, chain_plan, simulated, stepping
from tests.common.small_searches import SmallSearch, every_placement, small_search

RESIDENT = {"blocks": 0, "depth": 0, "homes": "hhh"}
"""Nothing is fetched: forward uses chunks at 0, 1 and 2 s, and their gradients are there at 6, 5 and 4."""
PLENTY = Budgets(1 << 50, 1 << 50)


@pytest.mark.parametrize("adam", [0.25, 1.0])
def test_only_the_last_chunks_update_is_left_for_the_next_step(adam: float) -> None:
    """Its gradients leave, and it is stepped and returns, after all of backward; the others have done so during it."""
    use, fetch, offload = 1.0, 0.125, 0.5
    step = simulated(chain_plan(**RESIDENT, in_backward=True), Speeds(use, fetch, offload, adam))
    assert step.step_s == pytest.approx(6 * use + offload + adam + fetch)
    assert step.phases_s["optimizer"] == pytest.approx(offload)
    assert step.waited_s["refresh"] == pytest.approx(adam + fetch)
    assert step.busy_s["host_adam"] == pytest.approx(3 * adam)
    assert step.moved_bytes == simulated(chain_plan(**RESIDENT), Speeds(use, fetch, offload, adam)).moved_bytes


@pytest.mark.parametrize("adam", [2.0, 5.0])
def test_a_slow_host_takes_what_forward_needs_first_at_the_end(adam: float) -> None:
    """It begins with the first gradient, a second into backward, and forward waits until all three are done."""
    plan = chain_plan(**RESIDENT, in_backward=True)
    step = simulated(plan, Speeds(adam=adam))
    assert step.step_s == pytest.approx(3 * adam + 3 + 1)
    assert step.bound_by == "host_adam"
    assert step.critical_s["host_adam"] == pytest.approx(3 * adam)


@pytest.mark.parametrize(
    ("early", "seconds"),
    [
        ((), 10.0),  # chunk 0 at 8, 1 at 10, 2 at 12 of which 6 are of the step before; then its use, and backward
        ((2,), 9.0),  # 2 from 4 to 6, during backward; 0 at 8, 1 at 10, and 2 is there
        ((1,), 9.0),  # 1 from 5 to 7; 0 at 9, 2 at 11
        ((0, 1, 2), 10.0),  # 2 at 6, 1 at 8, 0 at 10; then all of forward
    ],
)
def test_those_that_are_not_begun_in_backward_come_in_the_order_of_forward(
    early: tuple[int, ...], seconds: float
) -> None:
    assert simulated(stepping(chain_plan(**RESIDENT), *early), Speeds(adam=2.0)).step_s == pytest.approx(seconds)


def test_a_fetch_waits_for_its_chunks_update_whenever_that_began() -> None:
    """Streamed, a block each: the first fetch waits for the last update of backward, the others find theirs done."""
    use, fetch, offload, adam = 1.0, 0.5, 0.25, 0.75
    plan = chain_plan(blocks=3, depth=0, in_backward=True)
    step = simulated(plan, Speeds(use, fetch, offload, adam))
    assert step.step_s == pytest.approx(adam + 3 * fetch + 6 * use + offload)


def test_several_ranks_gather_resident_weights_when_the_optimizer_steps() -> None:
    """Reduce, offload, update, return; and the gather comes after `step`, for the others too."""
    use, fetch, offload, adam, gather = 1.0, 0.125, 0.5, 0.25, 0.0625
    speeds = Speeds(use, 2 * fetch, 2 * offload, adam, gather=2 * gather)
    plan = chain_plan(**RESIDENT, world_size=2, in_backward=True)
    step = simulated(plan, speeds)
    assert step.step_s == pytest.approx(6 * use + gather + offload + adam + fetch + gather)
    gathers = [span for span in step.timeline if span.name == "gather"]
    assert [span.chunk for span in gathers] == [0, 1, 2]
    assert gathers[0].start_s == pytest.approx(adam + fetch)


def test_what_the_device_steps_is_stepped_with_the_optimizer() -> None:
    plan = chain_plan(blocks=0, depth=0, homes="dhd", in_backward=True)
    assert [chunk.steps_in_backward for chunk in plan.chunks] == [False, True, False]
    step = simulated(plan, Speeds(adam=0.5, device_adam=0.25))
    assert step.step_s == pytest.approx(6 + 2 * 0.25)


def test_states_on_a_disk_are_stepped_with_the_optimizer_behind_those_that_were_not() -> None:
    """Chunk 1 is stepped from 3 to 6, of which 2 reach beyond backward; chunk 0 then, long since read."""
    plan, speeds = chain_plan(blocks=0, depth=0, homes="eh"), Speeds(adam=3.0, read=0.5, write=0.25)
    early = stepping(plan, 1)
    assert simulated(early, speeds).step_s == pytest.approx(2 + 3 + 4)
    assert simulated(plan, speeds).step_s == pytest.approx(0.5 + 3 + 3 + 3)
    # A disk that works beyond the last gradient gives the next step's updates more time, but for the first time later.
    slow = Speeds(adam=3.0, read=0.5, write=6.0)
    steady = simulated(early, slow).step_s
    assert simulated(early, slow, steps=5).step_s == pytest.approx(steady)
    assert simulated(early, slow, steps=2).step_s != pytest.approx(steady)


def test_with_several_batches_nothing_is_stepped_in_backward() -> None:
    plan, speeds = chain_plan(blocks=3, depth=1, in_backward=True), Speeds(adam=2.0)
    assert simulated(plan, speeds, accumulation=2) == simulated(stepping(plan), speeds, accumulation=2)


# --- which chunks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("adam", "chosen"), [(0.5, {1, 2}), (1.0, {1, 2}), (1.5, {1, 2}), (2.0, {2})])
def test_the_host_works_through_backward(adam: float, chosen: set[int]) -> None:
    """Gradients are home at 4, 5 and 6; what comes with the optimizer's step is no part of backward."""
    homes = {2: 4.0, 1: 5.0, 0: 6.0}
    assert worth_stepping(homes, 6.0, [adam] * 3, [0, 1, 2]) == chosen
    # Half a second later the host takes chunk 0 as well, wherever it is free by then; before chunk 1, if that waits.
    later = {0.5: {0, 1, 2}, 1.0: {0, 1, 2}, 1.5: {1, 2}, 2.0: {0, 2}}
    assert worth_stepping(homes, 6.5, [adam] * 3, [0, 1, 2]) == later[adam]


def test_of_several_that_are_home_forwards_first_is_taken() -> None:
    """Five come while one is stepped: two more fit, the latest to come each time."""
    homes = {index: 5.0 - index for index in range(6)}
    assert worth_stepping(homes, 6.0, [2.0] * 6, list(range(6))) == {5, 3, 1}
    assert worth_stepping({}, 6.0, [], []) == frozenset()


def _with_steps(search: SmallSearch, *, every: bool = False) -> SearchSpace:
    setting = replace(search.space.setting, step_in_backward=True, every_in_backward=every)
    return SearchSpace(search.space.trace, search.space.hardware, setting)


@pytest.mark.parametrize("seed", range(16))
def test_no_plan_is_slower_for_the_permission_and_the_choice_is_near_the_best(seed: int) -> None:
    """Against none, against all, and against every subset of chunks; steps from the second on are the same."""
    search, draw = small_search(seed, most_chunks=6), random.Random(seed)
    space, machine, ratios = _with_steps(search), search.space.hardware, []
    model = space.model(search.sizes[0])
    placements = every_placement(model)
    for placement in draw.sample(placements, min(4, len(placements))):
        depth = draw.randint(0, 2) if search.depth else 0
        blocks = model.work.schedule(placement.residents, depth).min_blocks
        candidate = weigh(model, placement, blocks, depth, space.cost)
        plan = to_plan(space, candidate, PLENTY, "Adam", "auto")
        every = to_plan(_with_steps(search, every=True), candidate, PLENTY, "Adam", "auto")
        able = [index for index, chunk in enumerate(every.chunks) if chunk.steps_in_backward]
        seconds = {
            chunks: simulate_step(stepping(plan, *chunks), space.trace, machine).step_s
            for count in range(len(able) + 1)
            for chunks in itertools.combinations(able, count)
        }
        mine = simulate_step(plan, space.trace, machine).step_s
        assert mine == candidate.seconds["total"] <= seconds[()]
        ratios.append(mine / min(seconds.values()))
        again = [simulate_step(every, space.trace, machine, steps=steps).step_s for steps in (2, 3, 7)]
        assert again == pytest.approx([again[0]] * 3, rel=1e-9)
    assert max(ratios) < 1.25
    assert np.mean(ratios) < 1.1


@settings(max_examples=40, deadline=None)
@given(
    homes=st.text("shdwke", min_size=1, max_size=6),
    world_size=st.sampled_from([1, 2]),
    spare=st.integers(0, 3),
    depth=st.integers(0, 2),
    kind=st.sampled_from(["cpu", "cuda"]),
    speeds=st.tuples(*[st.floats(0.01, 10.0)] * 8),
    some=st.integers(0, 63),
)
def test_steps_are_all_the_same_whichever_begin_in_backward(
    homes: str, world_size: int, spare: int, depth: int, kind: str, speeds: Any, some: int
) -> None:
    """From the one on that is simulated; every second of it is accounted for."""
    streamed = sum(home in "swk" for home in homes)
    depth = min(depth, max(streamed - 1, 0))
    blocks = min(1 + depth + spare, streamed)
    plan = chain_plan(blocks=blocks, depth=depth, homes=homes, world_size=world_size)
    plan = stepping(plan, *(index for index, home in enumerate(homes) if home in "shw" and some >> index & 1))
    machine, trace = Speeds(*speeds).machine(kind), chain(len(homes))
    step = simulate_step(plan, trace, machine)
    for steps in (4, 9):
        assert simulate_step(plan, trace, machine, steps=steps).step_s == pytest.approx(step.step_s, rel=1e-9)
    assert sum(step.phases_s.values()) == pytest.approx(step.step_s)
    assert step.busy_s["compute"] + sum(step.waited_s.values()) == pytest.approx(step.step_s)
    assert sum(step.critical_s.values()) == pytest.approx(step.step_s)
    assert all(0 <= span.start_s < span.end_s <= step.step_s for span in step.timeline)
    for resource in RESOURCES:
        spans = [span for span in step.timeline if span.resource == resource]
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(spans))
        assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(step.busy_s[resource])
    plain = simulate_step(stepping(plan), trace, machine)
    for resource in ("host_adam", "refresh", "disk"):
        assert step.busy_s[resource] == pytest.approx(plain.busy_s[resource])
