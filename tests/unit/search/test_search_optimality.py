"""The search finds what exhaustive simulation finds; what it skips could not have won; no plan beats the lower
bound."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from elixir.search.propose.best import find_best
from elixir.search.propose.climb import NEAR
from elixir.search.propose.local_search import LocalSearch
from elixir.search.propose.placement_batch import Variants

from benchmark.certificate.lower_bound import lower_bound
from elixir.optimizer_states import StateSize
from elixir.plan.chunk_plan import Home
from elixir.search import plan_from_trace
from elixir.search.problem.placement import Placement, Setting
from elixir.search.propose import local_search
from elixir.search.propose.candidate import weigh
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.units import GIB, MIB
from tests.common import inside
from tests.common.searching import HARDWARE
from tests.common.small_searches import SmallSearch, best_of_all, every_placement, small_search
from tests.common.synthetic_trace import TraceBuilder, stack_trace

NANOSECOND_S = 1e-9


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_of_a_small_search_is_faster(seed: int) -> None:
    """All homes, block counts and depths of all packings are simulated. benchmark/search_optimality.py has more."""
    search = small_search(seed, most_chunks=4)
    outcome = find_best(search.space, search.budgets, search.sizes, search.depth, classic=True)
    found, best = outcome.best, best_of_all(search)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert outcome.fastest_s is not None
        assert outcome.fastest_s <= best.seconds["total"] + NANOSECOND_S
        assert found.seconds["total"] <= NEAR * outcome.fastest_s


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", range(20, 30))
def test_more_chunks_where_floors_leave_out_what_cannot_win(seed: int) -> None:
    search = small_search(seed, most_chunks=7)
    outcome = find_best(search.space, search.budgets, search.sizes, search.depth, classic=True)
    best = best_of_all(search, skip=True)
    assert (outcome.best is None) == (best is None)
    if outcome.fastest_s is not None and best is not None:
        assert outcome.fastest_s <= best.seconds["total"] * 1.01


@pytest.mark.parametrize("seed", range(12))
def test_variants_need_what_the_memory_model_says_and_floors_lie_below_simulations(seed: int) -> None:
    search, draw = small_search(seed), random.Random(seed)
    for model in search.models():
        gathered = search.space.setting.world_size > 1 and draw.random() < 0.3
        variants = Variants(model, search.space.cost, gathered=gathered)
        codes = np.array([[draw.choice(homes) for homes in variants.homes] for _ in range(6)], dtype=np.int8)
        look = variants.look(codes, search.budgets.device_bytes)
        for row, code in enumerate(codes):
            placement = Placement.numbered(code.tolist())
            assert variants.codes(placement) is not None
            need, block = model.need(placement, 0), model.work.packing.block_bytes
            spare, streamed = search.budgets.device_bytes - need.device_bytes, placement.resident.count(False)
            fitting = -1 if spare < 0 else min(spare // block, streamed) if block else 0
            assert (look.blocks[row], look.host_bytes[row]) == (fitting, need.host_bytes)
            for depth in (0, 2):
                schedule = model.work.schedule(placement.residents, depth)
                blocks = max(schedule.min_blocks, draw.randint(0, streamed))
                candidate = weigh(model, placement, blocks, depth, search.space.cost)
                lower_bound_s = search.space.cost.lower_bound_of(model.work, placement, blocks, depth)
                assert lower_bound_s <= candidate.seconds["total"] * (1 + 1e-12)
                second = model.second_set_bytes * model.setting.ranks_per_host
                some = search.space.cost.early_choices(
                    model.work,
                    placement,
                    candidate.schedule,
                    overlap=candidate.overlap,
                    left_bytes=int(draw.choice((second[0], second.sum()))),
                )
                lower_bound_s = search.space.cost.lower_bound_of(model.work, placement, blocks, depth, early=True)
                for choice in (placement, *some):
                    step_s = weigh(model, choice, blocks, depth, search.space.cost).seconds["total"]
                    assert lower_bound_s <= step_s * (1 + 1e-12)


def test_the_curves_of_many_variants_are_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SearchSpace(stack_trace("opt-13b"), HARDWARE, Setting(1, 1, StateSize(8), True))
    variants = Variants(space.model(space.table.largest_bytes), space.cost)
    draw, live_bytes = random.Random(0), list[int]()
    codes = np.array([[draw.choice(homes) for homes in variants.homes] for _ in range(50)], dtype=np.int8)
    together = variants.look(codes, 130 * GIB)
    device = variants.model.device

    def noted(*args: Any) -> Any:
        found = device(*args)
        live_bytes.append(found.live.nbytes)
        return found

    monkeypatch.setattr(variants.model, "device", noted)
    inside.look_in_pieces(monkeypatch, 2000)
    pieces = variants.look(codes, 130 * GIB)
    assert np.array_equal(together.blocks, pieces.blocks)
    assert len(np.unique(pieces.blocks)) > 1
    assert max(live_bytes) <= 2000 < sum(live_bytes)


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
    placement = Placement.everywhere(Home.HOST, len(parts))
    plain = weigh(model, placement, 4, 2, space.cost)
    some = space.cost.early_choices(model.work, placement, plain.schedule, overlap=True, left_bytes=GIB)
    step_s = min(weigh(model, early, 4, 2, space.cost).seconds["total"] for early in some)
    lower_bound_s = space.cost.lower_bound_of(model.work, placement, 4, early=True)
    compute_s = space.cost.known(model.work).times.total_s
    assert compute_s < lower_bound_s <= step_s * (1 + 1e-12)
    assert step_s - lower_bound_s < (step_s - compute_s) / 10
    waiting_s = weigh(model, placement, 1, 0, space.cost).seconds["total"]
    lower_bound_s = space.cost.lower_bound_of(model.work, placement, 1, 0)
    assert space.cost.lower_bound_of(model.work, placement, 1, 1) < lower_bound_s <= waiting_s * (1 + 1e-12)
    assert waiting_s - lower_bound_s < (waiting_s - compute_s) / 2


@pytest.mark.parametrize("seed", range(6))
def test_what_some_chunks_rule_out_all_chunks_rule_out(seed: int) -> None:
    """A look at some chunks asks for no more memory, and no more time, than one at all of them."""
    search = small_search(seed)
    model = search.models()[0]
    variants, draw = Variants(model, search.space.cost), random.Random(seed)
    count = len(variants.homes)
    codes = np.array([[draw.choice(homes) for homes in variants.homes] for _ in range(20)], dtype=np.int8)
    whole = variants.look(codes, search.budgets.device_bytes)
    some = np.array(sorted(draw.sample(range(count), max(count // 2, 1))))
    part = variants.look(codes[:, some], search.budgets.device_bytes, some)
    assert (part.blocks >= whole.blocks).all()
    assert (part.host_bytes <= whole.host_bytes).all()
    assert (part.lower_bound_s <= whole.lower_bound_s * (1 + 1e-12)).all()


def test_more_blocks_never_make_a_step_slower_on_small_searches() -> None:
    """The search takes as many as fit for this reason."""
    for seed in range(40, 46):
        search = small_search(seed, most_chunks=4)
        model = search.models()[0]
        for placement in every_placement(model)[::3]:
            schedule = model.work.schedule(placement.residents, search.depth)
            streamed = placement.resident.count(False)
            times = [
                weigh(model, placement, blocks, search.depth, search.space.cost).seconds["total"]
                for blocks in range(schedule.min_blocks, streamed + 1)
            ]
            assert all(after <= before * (1 + 1e-12) for before, after in pairwise(times))


def test_homes_are_searched_from_any_start() -> None:
    """Single changes from any start lead to what looking at all homes gives."""
    search = small_search(3, most_chunks=6, world_size=1)
    model, depths = search.models()[0], range(3)
    local = LocalSearch(model, search.budgets, search.space.cost)
    on_host = Placement.numbered([homes[0] for homes in local.variants.homes])
    start = weigh(model, on_host, model.work.schedule(on_host.residents, 0).min_blocks, 0, search.space.cost)
    best, climbed = local.all(start, depths), local.better([start], depths)
    assert climbed is not None
    assert climbed.seconds["total"] < start.seconds["total"]
    assert climbed.seconds["total"] <= best.seconds["total"] * 1.01


def test_a_search_of_many_homes_looks_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further look takes a part of what is left, so that there are several."""
    monkeypatch.setattr(local_search, "LOOKS", most := 10_000)
    space = SearchSpace(stack_trace("opt-1.3b"), HARDWARE, Setting(1, 1, StateSize(8), True))
    model = space.model(space.table.largest_bytes)
    local = LocalSearch(model, Budgets(14 * GIB, 512 * GIB), space.cost)
    looks, look = [], local.variants.look

    def counted(codes: np.ndarray[Any, Any], *args: Any, **kwargs: Any) -> Any:
        looks.append(codes.size)
        return look(codes, *args, **kwargs)

    monkeypatch.setattr(local.variants, "look", counted)
    assert local.better([], range(1), all_on_host=True) is not None
    assert most // 2 < sum(looks) <= most
    assert max(looks) <= most // 4


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
