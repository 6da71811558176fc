"""Everything that a search tries is what was recorded: in which order, and with memory that it fills to the last byte.

A commit that means to change it records it anew and says why:

    python -m tests.unit.search.test_recorded_tries

Budgets that were drawn are never met exactly. Here each is: what was found becomes the budget, and a byte less.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elixir.search.propose.best import Outcome, find_best
from elixir.search.propose.climb import farthest, halved
from elixir.search.propose.fillings import Fillings
from elixir.search.propose.greedy import PlacementBuilder, by_saving, loads_per_chunk
from elixir.search.propose.local_search import LocalSearch

from elixir.artifact import digest
from elixir.hardware.scenario import Scenario
from elixir.optimizer_states import moments_size
from elixir.search.problem.placement import Spill
from elixir.search.propose import best, early_update_search, local_search, regret, trials
from elixir.search.propose.candidate import Candidate, early_host_bytes, settled
from elixir.search.propose.shortage import (
    Unmet,
    lacks_device,
    lacks_room,
    least_bytes,
    live_bytes,
    moments_instead,
    shortage,
)
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.question import Question
from elixir.search.request import HomeChoice, SearchRequest
from elixir.search.simulator.simulated_cost import SimulatedCost
from tests.common.small_searches import SmallSearch, small_search
from tests.unit.search.test_recorded_plans import rounded

RECORDED = Path(__file__).with_suffix(".json")
NAMES = (
    *(f"moves {seed}" for seed in range(8)),
    *(f"exact {seed}" for seed in range(10)),
    *(f"short {seed}" for seed in range(16)),
    *(f"homes {seed}" for seed in range(7)),
    *(f"least {seed}" for seed in range(7)),
    "steps",
)


def search_of(draw: random.Random, most_chunks: int = 6) -> SmallSearch:
    """A small search, of one batch or several, with early updates or a disk or neither."""
    search = small_search(draw.randrange(10_000), most_chunks=most_chunks)
    setting = replace(
        search.space.setting,
        accumulation=draw.choice((1, 1, 3)),
        early_updates=draw.choice((False, None, True)),
        spill=draw.choice((None, None, None, Spill(1, 1 << 50))),
    )
    machine = replace(search.space.hardware, disk_read_bytes_per_s=3e9, disk_write_bytes_per_s=2e9)
    budgets = search.budgets
    if draw.random() < 0.25:
        machine = replace(machine, device_kind="cpu", compute_capability=None)
        budgets = replace(budgets, device_bytes=draw.choice((budgets.device_bytes, 1 << 40)))
    return replace(search, budgets=budgets, space=SearchSpace(search.space.trace, machine, setting))


@contextlib.contextmanager
def simulated() -> Iterator[list[Any]]:
    """All steps that are simulated, in order."""
    found: list[Any] = []
    estimate = SimulatedCost.estimate

    def noted(self: SimulatedCost, work: Any, placement: Any, schedule: Any, **options: Any) -> Any:
        found.append([work.packing.capacity_bytes, placement.codes, schedule.blocks, schedule.prefetch_depth])
        return estimate(self, work, placement, schedule, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedCost, "estimate", noted)
        yield found


def moves(draw: random.Random) -> list[Any]:
    """Chunks that go to the device together or alone, with budgets that they fill exactly, and a byte less."""
    search = search_of(draw, most_chunks=12)
    found: list[Any] = []
    for size in sorted({search.sizes[0], draw.choice(search.sizes)}):
        model = search.space.model(size)
        chunks = list(range(len(model.work.chunks)))
        for give_back, blocks, resident in itertools.product((True, False), (0, len(chunks)), (True, False)):
            start = PlacementBuilder(model, blocks, give_back=give_back)
            draw.shuffle(chunks)
            peaks, whole = {start.peak_bytes()}, start.with_blocks(blocks)
            for state, chunk in itertools.product((False, True), chunks):
                whole.move_all([chunk], state=state, resident=resident, budget_bytes=1 << 60)
                peaks.add(whole.peak_bytes())
            lowered, lower = start.with_blocks(blocks), []
            while lowered.squeeze(lowered.peak_bytes() - 1):
                lower.append(lowered.peak_bytes())
            for peak in lower:
                again = start.with_blocks(blocks)
                found.append([again.squeeze(peak), again.placement().codes])
            for budget, state in itertools.product(sorted({p - less for p in peaks for less in (0, 1)}), (False, True)):
                builder = start.with_blocks(blocks)
                builder.move_all(chunks, state=state, resident=resident, budget_bytes=budget)
                found.append([builder.placement().codes, builder.peak_bytes(), builder.most_blocks(budget)])
                found.append(settled(model, builder, 1, budget))
                squeezed = start.with_blocks(blocks)
                found.append([squeezed.squeeze(budget), squeezed.placement().codes, squeezed.peak_bytes()])
        loads = loads_per_chunk(len(chunks), [draw.choice(chunks) for _ in range(9)])
        found += [loads, by_saving(model, loads, whole=True), by_saving(model, loads, whole=False)]
        fillings = Fillings(model, search.budgets.device_bytes, search.space.cost)
        for depth, blocks in itertools.product((0, 1, 3), (0, 1, 2, 4)):
            given = [list(fillings.at(blocks, depth, most_s, 1 << 60)) for most_s in (1.0, 1e-9)]
            found.append([[short(each) for each in some] for some in given])
            found += [fillings.hosting(count, blocks, depth) for count in range(len(chunks) + 2)]
            found.append(list(fillings.block_range(depth)))
    return [str(each) for each in found]


def short(candidate: Candidate | None) -> Any:
    """All that tells a candidate from others."""
    if candidate is None:
        return None
    schedule = candidate.schedule
    return [
        candidate.work.packing.capacity_bytes,
        candidate.placement.codes,
        schedule.blocks,
        schedule.prefetch_depth,
        candidate.thrift,
    ]


def shown(outcome: Outcome) -> list[Any]:
    """An outcome in short."""
    found = [short(each) for each in (outcome.best, outcome.resident, outcome.least_host)]
    return [*found, outcome.packings, outcome.fastest_s]


def exact(draw: random.Random) -> list[Any]:
    """Searches with budgets that the plan before has filled exactly, and with a byte less of either memory."""
    search = search_of(draw, most_chunks=5)
    sizes, depth, briefly = search.sizes[:3], search.depth, draw.random() < 0.5
    budgets, found = search.budgets, []
    with simulated() as tried:
        for less in ((0, 0), (1, 0), (0, 1), (0, 0)):
            outcome = find_best(search.space, budgets, sizes, depth, classic=draw.random() < 0.5, briefly=briefly)
            found.append(shown(outcome))
            if outcome.best is not None:
                need = outcome.best.need
                budgets = Budgets(need.device_bytes - less[0], need.host_bytes - less[1])
            elif outcome.least_host is not None:
                budgets = Budgets(budgets.device_bytes, outcome.least_host.need.host_bytes - less[1])
    return [found, tried]


def few(draw: random.Random) -> dict[tuple[Any, str], int]:
    """Limits of a search that a small one reaches."""
    return {
        (trials, "FEW_CHUNKS"): draw.choice((2, 3, 4)),
        (trials, "STARTS"): draw.choice((1, 2, 8)),
        (local_search, "SIMULATED_CHUNKS"): draw.choice((8, 40, 200)),
        (local_search, "FEW_SIMULATIONS"): draw.choice((4, 15)),
        (local_search, "LOOKS"): draw.choice((60, 600, 6000)),
        (best, "SIZES_PLACED"): draw.choice((1, 2)),
        (best, "SIZES_KEPT"): draw.choice((1, 2)),
        (best, "EARLY_CHUNKS"): draw.choice((3, 8)),
        (best, "FEW_CHUNKS"): draw.choice((3, 16)),
        (regret, "FEW_CHUNKS"): draw.choice((3, 16)),
        (early_update_search, "FIRST_STEP"): draw.choice((1, 2, 16)),
    }


def within_limits(draw: random.Random) -> list[Any]:
    """Searches that reach their limits."""
    search = search_of(draw)
    found = []
    with pytest.MonkeyPatch.context() as patch, simulated() as tried:
        for (module, name), value in few(draw).items():
            patch.setattr(module, name, value)
        for briefly in (True, False):
            outcome = find_best(search.space, search.budgets, search.sizes[::2], search.depth, briefly=briefly)
            found.append(shown(outcome))
        known = [each for each in (outcome.best, outcome.least_host, outcome.resident) if each is not None]
        here = search.space.on(Scenario(host_adam=0.5, link=0.7))
        found.append(shown(find_best(here, search.budgets, search.sizes[:2], search.depth, known=known)))
    return [found, tried]


def homes(draw: random.Random) -> list[Any]:
    """Homes that are tried near those that were found, and those that take least of the host."""
    search = search_of(draw, most_chunks=5)
    found: list[Any] = []
    outcome = find_best(search.space, search.budgets, search.sizes[:2], search.depth, briefly=True)
    start = outcome.best or outcome.least_host
    if start is None:
        return [None]
    for early, briefly in itertools.product((False, True), repeat=2):
        local = LocalSearch(start.model, search.budgets, search.space.cost, early=early, briefly=briefly)
        here = start if early else start.after_norm
        for most_s in (here.seconds["total"], 1.001 * here.seconds["total"], 10.0):
            found.append([short(each) for each in itertools.islice(local.neighbours(here, most_s, depths=(0, 1)), 60)])
        for most in (here.need.host_bytes, here.need.host_bytes - 1):
            found.append(short(local.least_host(1, most)))
        if not early:
            found.append(short(local.all(here, (0, 1, 2))))
    found.append(early_host_bytes(start.model, search.budgets))
    return found


def least(draw: random.Random) -> list[Any]:
    """The least memory that anything needs, and what is said to be short of it: by nothing, and by a byte."""
    search = search_of(draw, most_chunks=4)
    space, found = search.space, list[Any]()
    dtype = draw.choice(("bfloat16", "float32", "float64"))
    parameters = tuple(replace(each, dtype=dtype) for each in space.trace.parameters)
    trace = replace(space.trace, parameters=parameters, buffer_bytes=draw.choice((0, 10**7)))
    setting = replace(space.setting, frozen_weights=draw.choice(("host", "files")))
    given, optimizer = search.budgets.device_bytes, draw.choice(("Adam", "Adam", "SGD"))
    places: tuple[HomeChoice, ...] = ("auto", "cuda", "cpu")
    for placement in places:
        request = SearchRequest(world_size=setting.world_size, placement=placement, optimizer_type=optimizer)
        machine = replace(space.hardware, flops_per_s=dict.fromkeys((dtype, *space.hardware.flops_per_s), 1e14))
        question = Question(trace, machine, request)
        unmet, live = Unmet(question, setting), live_bytes(trace)
        fewer = replace(unmet, setting=replace(setting, states=moments_size("8bit"), moments="8bit", spill=None))
        for device in dict.fromkeys((least_bytes(unmet, None), live, given, 1 << 40)):
            for less in (0, 1):
                hosts = {least_bytes(unmet, device - less), least_bytes(fewer, device - less)}
                for host in sorted(hosts | {each - 1 for each in hosts}):
                    budgets = Budgets(device - less, host, draw.choice((0, 10**7)))
                    found += [budgets, moments_instead(unmet, budgets), lacks_room(trace, setting, budgets)]
                    found += [lacks_device(trace, budgets), str(shortage(unmet, budgets, lambda most=host: most + 1))]
    return [str(each) for each in found]


def steps(_: random.Random) -> list[Any]:
    """Steps of a climb, and the last number for which something holds."""
    found: list[Any] = [list(halved(step)) for step in range(10)]
    for good, bad in itertools.product(range(6), repeat=2):
        if good != bad:
            up = bad > good
            limits = range(good, bad) if up else range(bad + 1, good + 1)
            found += [farthest(good, bad, lambda n, e=end, u=up: n <= e if u else n >= e) for end in limits]
    return found


WAYS = {"moves": moves, "exact": exact, "short": within_limits, "homes": homes, "least": least, "steps": steps}


@functools.cache
def outcome(name: str) -> str:
    """The digest of one family of tries."""
    return digest(rounded(WAYS[name.partition(" ")[0]](random.Random(name))))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_tried_is_as_recorded(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in NAMES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
