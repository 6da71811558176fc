"""The rCache at run time: loads as simulated, right bytes always, never more blocks than there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import elixir.access.interception  # noqa: F401  registers what operators on marked memory reach
from elixir.chunk.chunk import Chunk, ChunkState
from elixir.chunk.gradients.gradient_flow import FlowOptions, GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import HostBuffers
from elixir.chunk.lanes import Emulation, Lanes, make_lanes
from elixir.chunk.memory import Arena, BlockPool
from elixir.chunk.rcache import RCache
from elixir.errors import StateError
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from elixir.schedule import Schedule, required_chunks

CPU = torch.device("cpu")
NUMEL = 128
Uses = list[tuple[tuple[int, ...], int]]


class Cache(RCache):
    """One that shows of what it was made."""

    def __init__(self, chunks: list[Chunk], schedule: Schedule, pool: BlockPool, *args: Any, **options: Any) -> None:
        super().__init__(chunks, schedule, pool, *args, **options)
        self.chunks, self.pool = chunks, pool


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    found = make_lanes(CPU)
    yield found
    found.close()


def make_cache(
    chunk_count: int,
    schedule: Schedule,
    blocks: int,
    lanes: Lanes,
    *,
    evict_always: bool = False,
) -> Cache:
    """Chunk i holds the number i."""
    arena, group = Arena(CPU), Group()
    pool = BlockPool(arena, blocks, NUMEL * 4, poison=True)
    none = GradientFlow([], arena, lanes, group, HostBuffers(arena), FlowOptions(block_count=0, block_bytes=0))
    chunks = []
    for index in range(chunk_count):
        plan = ChunkPlan("float32", True, NUMEL, (ParamSlot(f"p{index}", 0, NUMEL),), "host", "host", resident=False)
        chunk = Chunk(index, plan, [nn.Parameter(torch.zeros(NUMEL))], rank=0, world_size=1)
        chunk.shard = torch.full((NUMEL,), float(index))
        chunk.hold_placeholders()
        chunks.append(chunk)
    end = len(schedule.windows)
    buffers = HostBuffers(Arena(torch.device("cpu")))
    return Cache(chunks, schedule, pool, lanes, buffers, group, none, backward_from=end, evict_always=evict_always)


def check(cache: Cache, chunks: tuple[int, ...]) -> None:
    """All that was acquired is there, and nothing is where it should not be."""
    for index in chunks:
        assert (cache.chunks[index].filled == index).all()
        assert (cache.chunks[index].slots[0].parameter == index).all()
    in_blocks = cache.held
    assert len(in_blocks) + cache.pool.free == cache.pool.count
    assert len(set(in_blocks)) == len(in_blocks)
    for chunk in cache.chunks:
        assert (
            (chunk.state is ChunkState.HOME)
            == (chunk.block is None or not chunk.block.is_filled)
            == (chunk.index not in in_blocks)
        )


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, Uses]:
    """A number of chunks, and uses of them: which, and until when they are pinned."""
    chunk_count = draw(st.integers(1, 7))
    length = draw(st.integers(1, 24))
    uses: Uses = []
    for position in range(length):
        chunks = draw(st.lists(st.integers(0, chunk_count - 1), min_size=1, max_size=2, unique=True))
        uses.append((tuple(chunks), min(length - 1, position + draw(st.integers(0, 3)))))
    return chunk_count, uses


def open_later(gate: threading.Event) -> None:
    """Code that does not wait for what the gate holds back is past it by then."""
    threading.Timer(0.1, gate.set).start()


def run(cache: Cache, uses: Uses) -> None:
    """One step: acquire each use, and let it go after its last position."""
    cache.begin()
    pinned: list[tuple[int, tuple[int, ...]]] = []
    for position, (chunks, pin_until) in enumerate(uses):
        cache.acquire(chunks)
        pinned.append((pin_until, chunks))
        check(cache, tuple(chunk for _, held in pinned for chunk in held))
        for _, held in [item for item in pinned if item[0] <= position]:
            cache.unpin(held)
        pinned = [item for item in pinned if item[0] > position]


@settings(max_examples=150)
@given(order=orders(), depth=st.integers(0, 3), extra=st.integers(0, 3))
def test_loads_are_those_simulated(order: tuple[int, Uses], depth: int, extra: int) -> None:
    chunk_count, uses = order
    schedule = Schedule(required_chunks(uses), depth)
    blocks = schedule.min_blocks + extra
    lanes = make_lanes(CPU)
    cache = make_cache(chunk_count, schedule, blocks, lanes)
    for _ in range(2):  # the step after an optimizer step is like the one before
        run(cache, uses)
        counts = replace(lanes.counts)
        lanes.counts.reset()
        assert counts.loads == schedule.simulate(blocks).loads
        assert counts.demand_loads == counts.deviations == 0
        cache.invalidate()
    lanes.close()


@settings(max_examples=100)
@given(
    order=orders(),
    depth=st.integers(0, 2),
    asked=st.lists(
        st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=2, unique=True), st.booleans()), max_size=20
    ),
    evict_always=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_bytes_are_right_in_any_order(
    order: tuple[int, Uses], depth: int, asked: list[tuple[list[int], bool]], evict_always: bool, seed: int
) -> None:
    _, uses = order
    schedule = Schedule(required_chunks(uses), depth)
    blocks = max(schedule.min_blocks, 4)
    lanes = make_lanes(CPU, Emulation(delay_s=0.0005, seed=seed))
    cache = make_cache(7, schedule, blocks, lanes, evict_always=evict_always)
    held: list[list[int]] = []
    for chunks, again in asked:
        if again:
            cache.begin()
        while held and len({index for item in held for index in item} | set(chunks)) > blocks:
            cache.unpin(held.pop(0))
        cache.acquire(chunks)
        held.append(chunks)
        check(cache, tuple(index for item in held for index in item))
    for item in held:
        cache.unpin(item)
    assert all(chunk.pins == 0 for chunk in cache.chunks)
    cache.invalidate()
    check(cache, ())
    with pytest.raises(StateError, match="chunk 0 is home, it has no block"):
        _ = cache.chunks[0].filled
    lanes.close()


def test_what_writes_weights_waits_for_their_transfer_into_a_block(lanes: Lanes) -> None:
    cache = make_cache(2, Schedule([(0,), (1,)], 0), 1, lanes)
    gate, chunk = threading.Event(), cache.chunks[0]
    lanes.fetch.submit(gate.wait)
    cache.begin()
    acquires = threading.Thread(target=cache.acquire, args=([0],))
    acquires.start()
    while not chunk.at_home.readers:
        time.sleep(1e-3)
    assert chunk.shard is not None
    before = chunk.shard.clone()
    written = lanes.host_adam.submit(lambda: chunk.shard.fill_(-1), writes=[chunk.at_home])
    open_later(gate)
    written.synchronize()
    acquires.join()
    assert torch.equal(cache.chunks[0].filled, before)
    cache.unpin([0])
