"""Searches so small that every plan there is can be simulated: the traces, the machines, and all the plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from elixir.optimizer_states import StateSize
from elixir.plan.chunk_plan import Home
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Placement, Setting
from elixir.search.propose.candidate import Candidate, weigh
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.simulator.floors import MOST_AHEAD, Floors
from elixir.step_trace import StepTrace
from elixir.units import GIB, MIB
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import TraceBuilder

Homes = tuple[bool, bool, bool]
"""Resident, weights on the device, states on the device."""


@dataclass(frozen=True)
class SmallSearch:
    """One random instance."""

    space: SearchSpace
    budgets: Budgets
    sizes: tuple[int, ...]

    @property
    def models(self) -> list[MemoryModel]:
        """Packings that the search looks at."""
        return list(dict.fromkeys(map(self.space.model, self.sizes)))


def small_search(seed: int, *, most_chunks: int = 8, world_size: int | None = None) -> SmallSearch:
    """A trace with at most so many parameters, a machine with random speeds, and budgets between least and most."""
    draw = random.Random(seed)
    world = world_size or draw.choice((1, 2))
    trace = small_trace(draw, draw.randint(2, most_chunks))
    some = lambda: 10 ** draw.uniform(-0.7, 0.7)  # noqa: E731
    hardware = replace(
        make_hardware(),
        flops_per_s={"bfloat16": 1.7e14 * some()},
        device_memory_bytes_per_s=1e12 * some(),
        host_memory_bytes_per_s=1e11 * some(),
        host_to_device_bytes_per_s=1e10 * some(),
        device_to_host_bytes_per_s=1e10 * some(),
        device_to_device_bytes_per_s=3e10 * some(),
        host_adam_numel_per_s=3e9 * some(),
        device_adam_numel_per_s=3e10 * some(),
        host_memory_bytes=512 * GIB,
    )
    overlap = draw.random() < 0.9
    setting = Setting(world, world, StateSize(draw.choice((8, 8, 4))), overlap)
    space = SearchSpace(trace, hardware, setting)
    sizes = space.sizes(outsized=True)
    model = space.model(draw.choice(sizes))
    least, most = _extremes(model)
    device = int(least + (most - least) * draw.uniform(0.0, 1.0)) if most > least else least
    host = model.need(_everywhere(model, on_device=False), 0).host_bytes
    return SmallSearch(space, Budgets(device, int(host * draw.choice((0.8, 1.0, 1.0, 2.0)))), sizes)


def small_trace(draw: random.Random, count: int) -> StepTrace:
    """A step through so many layers of one parameter each: some frozen, one tied, maybe checkpointed."""
    build = TraceBuilder()
    trained = [draw.random() < 0.9 for _ in range(count)]
    trained[0] = trained[0] or not any(trained)
    layers = [
        build.parameter(f"layers.{i}.p", 1024, draw.choice((8, 12, 16, 24)) * MIB // 1024, trainable=trained[i])
        for i in range(count)
    ]
    live = draw.randint(1, 64) * MIB
    work = lambda: draw.randint(1, 100) * 10**9  # noqa: E731
    tied, checkpointed = draw.random() < 0.4, draw.random() < 0.5
    for at, index in enumerate(layers):
        build.use("forward", index, flops=work(), live=(at + 1) * live // 2, pin=draw.choice((0, 0, 0, 1)))
    if tied:
        build.use("forward", layers[0], flops=work(), live=count * live // 2)
        build.use("backward", layers[0], flops=work(), live=count * live // 2)
    for at, index in reversed(list(enumerate(layers))):
        if checkpointed:
            build.use("recompute", index, flops=work(), live=(at + 2) * live // 2)
        build.use("backward", index, flops=2 * work(), live=(at + 1) * live // 2, pin=draw.choice((0, 0, 1)))
    return build.build("small")


def _everywhere(model: MemoryModel, *, on_device: bool) -> Placement:
    if on_device:
        return Placement((Home.RESIDENT,) * len(model.work.chunks))
    outsized = {True: Home.RESIDENT_HOST, False: Home.RESIDENT}
    return Placement(tuple(outsized[c.trainable] if c.outsized else Home.HOST for c in model.work.chunks))


def _extremes(model: MemoryModel) -> tuple[int, int]:
    """Device bytes with as much as possible on the host, and with everything on the device."""
    host = _everywhere(model, on_device=False)
    blocks = model.work.schedule(host.residents, 0).min_blocks
    return model.need(host, blocks).device_bytes, model.need(_everywhere(model, on_device=True), 0).device_bytes


def homes_of(model: MemoryModel, chunk: int, *, gathered: bool) -> list[Homes]:
    """Everything a plan may do with a chunk; with several ranks all are resident (`gathered`) or none."""
    facts, several = model.work.chunks[chunk], model.setting.world_size > 1
    return [
        (resident, weight, state)
        for resident, weight, state in itertools.product((False, True), repeat=3)
        if (weight or not resident)  # resident weights are on the device
        and (several or weight == resident)  # with one rank nothing else is
        and (weight or not state)
        and (facts.trainable or state == weight)
        and (resident or not facts.outsized)
        and (not several or facts.outsized or resident == gathered)
    ]


def every_placement(model: MemoryModel) -> list[Placement]:
    """All homes of all chunks."""
    chunks = range(len(model.work.chunks))
    families = (False, True)[: model.setting.world_size]
    found = (
        itertools.product(*(homes_of(model, chunk, gathered=gathered) for chunk in chunks)) for gathered in families
    )
    return [Placement(tuple(map(home_of, homes))) for family in found for homes in family]


def home_of(homes: Homes) -> Home:
    """The home with these flags."""
    resident, weight, state = homes
    return Home.find(resident, "device" if weight else "host", "device" if state else "host")


def every_plan(model: MemoryModel, search: SmallSearch, placement: Placement) -> Iterator[Candidate]:
    """All plans with these homes that fit: all block counts, all prefetch depths."""
    work, budgets = model.work, search.budgets
    need = model.need(placement, 0)
    if need.device_bytes > budgets.device_bytes or need.host_bytes > budgets.host_bytes:
        return
    block = work.packing.block_bytes
    room = (budgets.device_bytes - need.device_bytes) // block if block else 0
    streamed = placement.resident.count(False)
    for depth in range(min(MOST_AHEAD, streamed) + 1) if search.space.setting.overlap else (0,):
        fewest = work.schedule(placement.residents, depth).min_blocks
        for blocks in range(fewest, min(room, streamed) + 1):
            yield weigh(model, placement, blocks, depth, search.space.cost)


def best_of_all(search: SmallSearch, *, skip: bool = False) -> Candidate | None:
    """The fastest plan there is, found by simulating all of them.

    Args:
        search: the instance.
        skip: leave out homes whose floor, with a block for every chunk, is above the best so far.
    """
    best: Candidate | None = None
    for model in search.models:
        placements = every_placement(model)
        floors = _floors(search, model, placements) if skip else np.zeros(len(placements))
        for at in np.argsort(floors, kind="stable").tolist():
            if best is not None and floors[at] > best.seconds["total"] * (1 + 1e-9):
                break
            for candidate in every_plan(model, search, placements[at]):
                if best is None or candidate.seconds["total"] < best.seconds["total"]:
                    best = candidate
    return best


def _floors(search: SmallSearch, model: MemoryModel, placements: list[Placement]) -> npt.NDArray[np.float64]:
    codes, count = np.array([placement.codes for placement in placements]), len(model.work.chunks)
    return Floors([search.space.cost.times(model)]).seconds(codes, np.full(len(placements), count))[0]
