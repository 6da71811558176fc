"""No floor is above a simulation: placements at random, with every kind of home, matrices, disks, replicas and files,
on a machine and on a slower one at once."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from elixir.hardware.scenario import Scenario
from elixir.plan.chunk_plan import Home
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import HOMES, Placement
from elixir.search.propose.candidate import weigh
from elixir.search.propose.sizes import SearchSpace
from elixir.search.simulator.floors import Floors
from tests.common.small_searches import small_search

SLOW = Scenario(host_adam=0.3, link=0.6)
PLACEMENTS = 12
"""Placements of each seed."""


def random_space(draw: random.Random, seed: int) -> SearchSpace:
    """A small step on a random machine, with whatever a setting may have."""
    small = small_search(seed, most_chunks=draw.choice((8, 24)))
    world, replicas = draw.choice(((1, 1), (2, 1), (2, 2), (4, 2)))
    names = [parameter.name for parameter in small.space.trace.parameters if parameter.trainable]
    some = lambda: 10 ** draw.uniform(-0.7, 0.7)  # noqa: E731
    kind = draw.choice(("cuda", "cuda", "cpu"))
    hardware = replace(
        small.space.hardware,
        device_kind=kind,
        compute_capability=(9, 0) if kind == "cuda" else None,
        disk_read_bytes_per_s=3e9 * some(),
        disk_write_bytes_per_s=2e9 * some(),
    )
    setting = replace(
        small.space.setting,
        world_size=world,
        ranks_per_host=world,
        replicas=replicas,
        early_updates=True,
        accumulation=draw.choice((1, 1, 2, 3, 5, 16, 64)),
        clipping=draw.random() < 0.7,
        matrices=frozenset(name for name in names if draw.random() < 0.3) if draw.random() < 0.4 else frozenset(),
        frozen_weights=draw.choice(("host", "files")),
        device_kind=kind,
        overlap=draw.random() < 0.8,
    )
    return SearchSpace(small.space.trace, hardware, setting)


def random_placement(draw: random.Random, model: MemoryModel) -> Placement:
    """Homes that a plan may have; with several ranks all chunks are resident or none, but for outsized ones."""
    several, homes = model.setting.shards > 1, []
    gathered, bias = several and draw.random() < 0.3, draw.random()
    for c, chunk in enumerate(model.work.chunks):
        able = [
            home
            for home in HOMES
            if (home.without_states if not chunk.trainable else home.weights != "files")
            and (home.weights != "files" or model.setting.frozen_weights == "files")
            and (several or home.resident == home.weights_on_device)
            and (home.resident if chunk.outsized else not several or home.resident == gathered)
            and (not home.early or model.work.early_able[c])
        ]
        plain = [home for home in able if not home.states_on_disk]
        homes.append(draw.choice(able if draw.random() < bias else plain))
    return Placement(tuple(homes))


def tightness(seed: int, placements: int = PLACEMENTS) -> tuple[list[float], Counter[str]]:
    """Floors over simulated seconds of random placements, and how often they have each home."""
    draw = random.Random(seed)
    space = random_space(draw, seed)
    found, seen = [], Counter[str]()
    for _ in range(placements):
        model = space.model(draw.choice(space.sizes(outsized=True)))
        costs = [space.on(scenario).cost for scenario in (Scenario(), SLOW)]
        machines = [cost.times(model) for cost in costs]
        floors = Floors(machines)
        placement = random_placement(draw, model)
        depth = draw.choice((0, 1, 2, 4)) if space.setting.overlap else 0
        streamed = placement.resident.count(False)
        fewest = model.work.schedule(placement.residents, depth).min_blocks
        blocks = draw.randint(fewest, max(fewest, streamed)) if streamed else 0
        second = (model.second_set_bytes * model.setting.ranks_per_host)[list(placement.early)].sum()
        for clipped in (False, True):
            early = bool(placement.early) and not clipped
            floors_s = floors.seconds(
                placement.codes[None],
                np.array([blocks]),
                early=early,
                prefetch=depth > 0 or not blocks,
                room_bytes=np.array([second]) if early else None,
            )
            for cost, floor_s in zip(map(copy.copy, costs), floors_s[:, 0].tolist(), strict=True):
                cost.clipped = clipped
                found.append(floor_s / weigh(model, placement, blocks, depth, cost).seconds["total"])
        seen.update(home.name for home in placement.homes)
    return found, seen


@pytest.mark.parametrize("seed", [*range(8), 277])
def test_no_floor_is_above_its_simulation(seed: int) -> None:
    """The last one has no overlap: a gradient begins before the one before it has left its block."""
    assert max(tightness(seed)[0]) <= 1 + 1e-12


@pytest.mark.slow
def test_no_floor_is_above_its_simulation_in_many_searches() -> None:
    """All homes come up, and an eighth of the floors is within a hundredth."""
    found, seen = list[float](), Counter[str]()
    for seed in range(150):
        ratios, homes = tightness(seed, 25)
        assert max(ratios) <= 1 + 1e-12, seed
        found += ratios
        seen += homes
    assert set(seen) == {home.name for home in Home}
    assert np.mean(np.array(found) > 0.99) > 0.125
