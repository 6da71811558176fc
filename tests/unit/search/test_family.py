"""Shapes: their bytes are those of the memory model, and no more fits than they take."""

from __future__ import annotations

import random

import numpy as np
import pytest

from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Placement
from elixir.search.propose.family import IN_ORDER, SPREAD, Family
from elixir.search.propose.sizes import Budgets, SearchSpace
from tests.unit.search.test_floors import random_placement, random_space


def family_of(draw: random.Random, space: SearchSpace, model: MemoryModel) -> Family:
    """A family with budgets between the least and the most that the packing needs."""
    times = space.cost.times(model)
    kind = {"gathered": model.setting.world_size > 1 and draw.random() < 0.5, "evenly": draw.random() < 0.5}
    family = Family(model, times, Budgets(1 << 60, 1 << 60), **kind)
    away = np.array([0, family.most_away])
    rows = family.rows(away, family.fewest[0])
    least, most = (model.need(Placement.numbered(codes.tolist()), 0) for codes in rows.codes[::-1])
    device = draw.uniform(0.9 * least.device_bytes, 1.1 * most.device_bytes)
    return Family(model, times, Budgets(int(device), int(draw.uniform(0.9, 1.1) * least.host_bytes)), **kind)


@pytest.mark.parametrize("seed", range(10))
def test_bytes_of_shapes_are_those_of_the_memory_model(seed: int) -> None:
    draw = random.Random(seed)
    space = random_space(draw, seed)
    for _ in range(6):
        model = space.model(draw.choice(space.sizes(outsized=True)))
        family = family_of(draw, space, model)
        blocks, order, share = draw.choice(family.fewest), draw.choice((IN_ORDER, SPREAD)), draw.choice((1.0, 1.0, 0.5))
        rows = family.rows(np.arange(family.most_away + 1), blocks, order, share)
        for codes, count, fits, host in zip(*rows, strict=True):
            placement = Placement.numbered(codes.tolist())
            need = model.need(placement, int(count))
            streamed = placement.resident.count(False)
            assert host == need.host_bytes
            room = need.device_bytes <= family.budgets.device_bytes and count >= min(blocks, streamed)
            assert fits == (room and need.host_bytes <= family.budgets.host_bytes)
            if fits and share == 1.0 and count < streamed:
                more = model.need(placement, int(count) + 1)
                assert more.device_bytes > family.budgets.device_bytes


@pytest.mark.parametrize("seed", range(4))
def test_host_bytes_of_many_placements_are_the_sums_of_their_parts(seed: int) -> None:
    """Homes are random, with early updates, disks, files, matrices and several micro-batches."""
    draw = random.Random(seed)
    space = random_space(draw, seed)
    model = space.model(draw.choice(space.sizes(outsized=True)))
    placements = [random_placement(draw, model) for _ in range(20)]
    found = model.host_bytes(np.array([placement.codes for placement in placements]))
    assert found.tolist() == [sum(model.host_parts(placement).values()) for placement in placements]


def test_the_least_number_of_states_away_is_found_by_a_look_at_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir.search.propose.family.GRID", 3)
    draw, compared = random.Random(1), 0
    for seed in range(30):
        space = random_space(draw, seed)
        model = space.model(min(space.sizes(outsized=True)))
        family = family_of(draw, space, model)
        budgets = Budgets(family.budgets.device_bytes, 1 << 60)
        family = Family(model, space.cost.times(model), budgets, gathered=family.gathered)
        fits = np.flatnonzero(family.rows(np.arange(family.most_away + 1), family.fewest[0]).fits)
        assert family.least_away == (fits[0] if len(fits) else family.most_away + 1)
        compared += family.most_away > 3
    assert compared
