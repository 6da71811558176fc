"""Packing keeps every parameter once, aligned, in order of use; few of many sizes pack differently."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir.plan.chunk_plan import PARAM_ALIGNMENT_BYTES
from elixir.search.problem.packing import (
    GRID_REACH,
    MIN_CHUNK_BYTES,
    ParamTable,
    minimum_waste_size,
    round_up,
    search_grid,
)
from elixir.step_trace import StepTrace
from elixir.units import dtype_bytes
from tests.common.synthetic_trace import TraceBuilder, stack_trace


@st.composite
def traces(draw: st.DrawFn) -> StepTrace:
    """A handful of parameters of mixed dtype, some frozen, some never used, some used twice or in forward alone."""
    build = TraceBuilder()
    count = draw(st.integers(1, 12))
    for index in range(count):
        build.parameter(
            f"layers.{index // 3}.p{index}",
            draw(st.integers(1, 3000)),
            dtype=draw(st.sampled_from(["bfloat16", "bfloat16", "float32"])),
            trainable=draw(st.booleans()) or index == 0,
        )
    used = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=16))
    for index in used:
        build.use("forward", index)
    for index in draw(st.lists(st.sampled_from(used), max_size=16)):
        build.use("backward", index)
    return build.build("random")


@given(traces(), st.integers(1, 8), st.integers(1, 20_000))
@settings(max_examples=150, deadline=None)
def test_every_parameter_has_one_aligned_place(trace: StepTrace, world_size: int, capacity: int) -> None:
    table = ParamTable(trace, world_size)
    packing = table.pack(capacity)
    assert sorted(m for chunk in packing.chunks for m in chunk.parameters) == list(range(len(trace.parameters)))
    for chunk in packing.chunks:
        infos = [trace.parameters[member] for member in chunk.parameters]
        assert {(info.dtype, info.trainable) for info in infos} == {(chunk.dtype, chunk.trainable)}
        assert chunk.bytes % (world_size * PARAM_ALIGNMENT_BYTES) == 0
        assert chunk.bytes <= packing.capacity_bytes or (chunk.outsized and len(chunk.parameters) == 1)
        end = 0
        for info, offset in zip(infos, chunk.offset_bytes, strict=True):
            assert offset % PARAM_ALIGNMENT_BYTES == 0
            assert offset >= end
            end = offset + info.numel * dtype_bytes(info.dtype)
        assert end <= chunk.bytes


def test_first_use_decides_the_order_not_the_model() -> None:
    build = TraceBuilder()
    for index in range(4):
        build.parameter(f"p{index}", 256)
    for index in (2, 0, 2, 3):
        build.use("forward", index)
    packing = ParamTable(build.build("shuffled"), 1).pack(1024)
    assert [chunk.parameters for chunk in packing.chunks] == [(2, 0), (3, 1)]


def waste_bytes(table: ParamTable, capacity: int) -> int:
    """Padding if every chunk that is not outsized took a whole block."""
    packing = table.pack(capacity)
    chunks = [chunk for chunk in packing.chunks if not chunk.outsized]
    used = sum(table.bytes[member] for chunk in chunks for member in chunk.parameters)
    return len(chunks) * packing.block_bytes - int(used)


@given(traces(), st.integers(1, 4), st.lists(st.integers(0, 30_000), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_any_capacity_from_the_largest_chunk_up_packs_alike(
    trace: StepTrace, world_size: int, extra: list[int]
) -> None:
    table = ParamTable(trace, world_size)
    sizes = [round_up(table.largest_bytes + amount, table.unit_bytes) for amount in extra]
    packings = [table.pack(size) for size in sizes]
    for here in packings:
        assert table.pack(here.block_bytes).chunks == here.chunks
        for there in packings:
            assert (here.block_bytes == there.block_bytes) == (here.chunks == there.chunks)


@pytest.mark.parametrize("name", ["opt-1.3b", "gpt2-15b"])
def test_least_waste_is_least_over_the_grid(name: str) -> None:
    table = ParamTable(stack_trace(name), 2)
    size = minimum_waste_size(table)
    grid = search_grid(table)
    assert grid[0] <= size <= grid[-1] <= GRID_REACH * max(table.largest_bytes, MIN_CHUNK_BYTES) + table.unit_bytes
    layer = table.layer_bytes[0]
    multiples = [k * layer for k in range(1, int(grid[-1]) // layer + 1) if k * layer >= grid[0]]
    assert all(waste_bytes(table, size) <= waste_bytes(table, other) for other in [*grid[::97].tolist(), *multiples])


def test_a_layer_is_what_repeats() -> None:
    table = ParamTable(stack_trace("opt-13b"), 1)
    hidden, ffn = 5120, 20480
    weights = 2 * (4 * hidden * hidden + 2 * hidden * ffn)
    vectors = 2 * (4 * hidden + 4 * hidden + ffn + hidden)
    assert table.layer_bytes == (weights + vectors,)
