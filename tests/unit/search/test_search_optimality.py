"""The search finds what exhaustive simulation finds, within its budgets, and no plan beats a floor or the lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmark.certificate.lower_bound import lower_bound
from elixir.hardware.scenario import Scenario
from elixir.optimizer_states import StateSize
from elixir.plan.chunk_plan import Home
from elixir.search import plan_from_trace
from elixir.search.problem.placement import Placement, Setting
from elixir.search.propose.candidate import weigh
from elixir.search.propose.judge import Outcome
from elixir.search.propose.search import ShapeSearch
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.simulator.floors import Floors
from elixir.units import GIB, MIB
from tests.common.searching import HARDWARE
from tests.common.small_searches import SmallSearch, best_of_all, small_search
from tests.common.synthetic_trace import TraceBuilder, stack_trace

WITHIN = 1.001
SCENARIOS = (Scenario(), Scenario(host_adam=0.3), Scenario(link=0.6), Scenario(host_adam=0.3, link=0.6))


def found_by(search: SmallSearch, among: Sequence[Scenario] = SCENARIOS[:1]) -> Outcome | None:
    """The outcome of the search."""
    return ShapeSearch(search.space, search.budgets, search.sizes, among).find()


@pytest.mark.parametrize(("seed", "most_chunks"), [*((seed, 4) for seed in range(8)), *((n, 7) for n in range(20, 26))])
def test_no_plan_of_a_small_search_is_faster(seed: int, most_chunks: int) -> None:
    """All homes, block counts and depths of all packings are simulated. benchmark/search_optimality.py has more.

    If there may be more chunks, homes whose floor is above what was found are left out.
    """
    search = small_search(seed, most_chunks=most_chunks)
    outcome, best = found_by(search), best_of_all(search, skip=most_chunks > 4)
    assert (outcome is None) == (best is None)
    if outcome is not None and best is not None:
        assert outcome.best.need.device_bytes <= search.budgets.device_bytes
        assert outcome.best.need.host_bytes <= search.budgets.host_bytes
        assert outcome.best.seconds["total"] == outcome.fastest_s <= WITHIN * best.seconds["total"]


@pytest.mark.parametrize("seed", [8, 33, 56])
def test_no_budget_has_a_slower_fastest_step_than_a_smaller_one(seed: int) -> None:
    search, found = small_search(seed, most_chunks=6), list[tuple[float, float, float]]()
    for device, host in product((0.8, 1.0, 1.3), repeat=2):
        budgets = Budgets(int(device * search.budgets.device_bytes), int(host * search.budgets.host_bytes))
        outcome = found_by(replace(search, budgets=budgets))
        if outcome is not None and outcome.fastest_s is not None:
            found.append((device, host, outcome.fastest_s))
    assert found
    for (device, host, less_s), (more, much, more_s) in product(found, found):
        if device <= more and host <= much:
            assert more_s <= 1.001 * less_s


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_floor_is_what_a_step_takes_that_waits_at_its_ends_only(world_size: int) -> None:
    """The first chunk comes in while compute waits, and the last gradient leaves when compute is over."""
    build = TraceBuilder()
    parts = [build.parameter(f"layers.{i}.p", 16 * MIB) for i in range(6)]
    for part in parts:
        build.use("forward", part, flops=10**13, live=MIB)
    for part in reversed(parts):
        build.use("backward", part, flops=2 * 10**13, live=MIB)
    quick = replace(HARDWARE, host_adam_numel_per_s=1e14, host_memory_bytes_per_s=1e15)
    space = SearchSpace(build.build("stack"), quick, Setting(world_size, world_size, StateSize(8), True))
    model = space.model(space.table.largest_bytes)
    placement = Placement((Home.HOST,) * len(parts))
    floors, codes = Floors([space.cost.times(model)]), placement.codes[None]
    compute_s = space.cost.times(model).total_s
    early = space.cost.early_chunks(model, placement, speed=1.0, left_bytes=GIB, rule=0)
    assert early
    step_s = weigh(model, placement.updated_early(early), 4, 2, space.cost).seconds["total"]
    floor_s = floors.seconds(codes, np.array([4]), early=True)[0]
    assert compute_s < floor_s <= step_s * (1 + 1e-12)
    assert step_s - floor_s < (step_s - compute_s) / 10
    waiting_s = weigh(model, placement, 1, 0, space.cost).seconds["total"]
    ahead_s, floor_s = (floors.seconds(codes, np.array([1]), prefetch=ahead)[0] for ahead in (True, False))
    assert ahead_s < floor_s <= waiting_s * (1 + 1e-12)
    assert waiting_s - floor_s < (waiting_s - compute_s) / 2


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_beats_the_lower_bound(seed: int) -> None:
    search: SmallSearch = small_search(seed, most_chunks=6)
    best = best_of_all(search, skip=True)
    bound = lower_bound(search.space, search.budgets)
    if best is not None:
        assert bound is not None
        assert 0 < bound.step_s <= best.seconds["total"]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "world_size", "device_gib"), [("opt-1.3b", 1, 14), ("opt-6.7b", 4, 24)])
def test_plans_of_known_models_are_near_the_lower_bound(name: str, world_size: int, device_gib: int) -> None:
    """The host's Adam is slow here compared with the device."""
    trace = stack_trace(name)
    machine = replace(HARDWARE, host_adam_numel_per_s=HARDWARE.host_adam_numel_per_s / 4)
    budgets = Budgets(device_gib * GIB, 512 * GIB)
    made = plan_from_trace(
        trace,
        machine,
        world_size,
        device_memory=budgets.device_bytes,
        early_updates=False,  # the bound knows of no update before the norm
    ).plan
    setting = Setting(world_size, world_size, StateSize(8), True)
    bound = lower_bound(SearchSpace(trace, machine, setting), budgets)
    assert bound is not None
    assert bound.step_s <= made.predicted.seconds["total"] <= 1.15 * bound.step_s
    assert 0 <= bound.device_states <= 1
    assert sum(bound.rows.values()) > 0


def test_a_bound_grows_with_slower_parts_and_smaller_budgets_and_ends_where_nothing_fits() -> None:
    trace = stack_trace("opt-1.3b")
    setting = Setting(1, 1, StateSize(8), True)

    def step_s(device_gib: float, **changes: float) -> float:
        space = SearchSpace(trace, replace(HARDWARE, **changes), setting)
        bound = lower_bound(space, Budgets(int(device_gib * GIB), 512 * GIB))
        assert bound is not None
        return bound.step_s

    base = step_s(14)
    for slower in ("host_adam_numel_per_s", "host_to_device_bytes_per_s", "device_memory_bytes_per_s"):
        assert step_s(14, **{slower: getattr(HARDWARE, slower) / 50}) > base
    assert step_s(10) > base > step_s(40)
    for budgets in (Budgets(1 * GIB, 512 * GIB), Budgets(14 * GIB, 1 * GIB)):
        assert lower_bound(SearchSpace(trace, HARDWARE, setting), budgets) is None
