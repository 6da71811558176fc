"""A chunk's states, the pool of blocks, and gradients on their way."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn

import elixir.access.interception  # noqa: F401  registers what operators on marked memory reach
from elixir import torch_private
from elixir.access.placeholders import is_absent
from elixir.chunk import memory as block_pool
from elixir.chunk.chunk import Chunk, ChunkState
from elixir.chunk.gradients.gradient_flow import FlowOptions, GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import SUMMANDS, BufferKind, HostBuffers
from elixir.chunk.lanes import Emulation, Lanes, make_lanes
from elixir.chunk.memory import Arena, BlockPool
from elixir.errors import StateError
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from tests.common import inside

CPU = torch.device("cpu")


def make_chunk(
    index: int = 0,
    shapes: tuple[tuple[int, ...], ...] = ((4, 8), (), (3,)),
    *,
    rank: int = 0,
    device: str = "cpu",
) -> Chunk:
    """Parameters at multiples of 128 elements."""
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    slots = tuple(ParamSlot(f"p{index}.{i}", 128 * i, p.numel()) for i, p in enumerate(parameters))
    plan = ChunkPlan("float32", True, 128 * len(slots), slots, weight_home="host", state_home="host", resident=False)
    return Chunk(index, plan, parameters, rank=rank, world_size=1)


def bring(chunk: Chunk, state: ChunkState, memory: torch.Tensor) -> None:
    path = {
        ChunkState.HOME: (),
        ChunkState.FETCHING: (ChunkState.FETCHING,),
        ChunkState.CACHED: (ChunkState.FETCHING, ChunkState.CACHED),
        ChunkState.RESIDENT: (ChunkState.RESIDENT,),
    }
    for step in path[state]:
        chunk.to(step, memory if step in (ChunkState.CACHED, ChunkState.RESIDENT) else None)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(ChunkState, ChunkState)))
def test_only_transitions_of_the_table(old: ChunkState, new: ChunkState) -> None:
    chunk, memory = make_chunk(7, rank=3), torch.zeros(384)
    bring(chunk, old, memory)
    if new in inside.transitions(Chunk)[old]:
        chunk.to(new, memory if new in (ChunkState.CACHED, ChunkState.RESIDENT) else None)
        assert chunk.state is new
        return
    with pytest.raises(StateError, match=rf"rank 3: chunk 7 \(p7.0.*{old.value} to {new.value}"):
        chunk.to(new, memory)
    assert chunk.state is old


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_of_a_chunk_at_home_have_no_memory_once_attached(device: str) -> None:
    chunk = make_chunk(device=device)
    assert not any(chunk.shows(slot) for slot in chunk.slots)
    chunk.attach()
    assert all(chunk.shows(slot) and is_absent(slot.parameter) for slot in chunk.slots)
    assert chunk.state is ChunkState.HOME


def test_a_chunk_without_memory_says_so() -> None:
    chunk = make_chunk(7, rank=3)
    with pytest.raises(StateError, match="rank 3: chunk 7 has no weights yet"):
        _ = chunk.shard_weights
    with pytest.raises(StateError, match="rank 3: chunk 7 is home, it has no block"):
        chunk.take_written(chunk.slots[0].parameter)


def test_every_element_is_some_parameters() -> None:
    chunk = make_chunk()
    found = [chunk.parameter_at(offset) for offset in (0, 31, 128, 256, 258)]
    assert [next(i for i, slot in enumerate(chunk.slots) if slot.parameter is p) for p in found] == [0, 0, 1, 2, 2]


# --- blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_views_follow_a_block_and_poison_is_nan(
    dtype: torch.dtype, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = moves and torch_private.MEMORY_MOVES  # not before torch 2.13
    if not moves:
        for module in (torch_private, block_pool):
            monkeypatch.setattr(module, "MEMORY_MOVES", False)
    pool = BlockPool(Arena(CPU), 2, 2**21, poison=True)
    first, second = (pool.block(16, dtype) for _ in range(2))
    pool.fill(first)
    taken, view = first.flat.numpy() if dtype is torch.float32 and moves else None, first.flat[2:4]
    pool.fill(second)
    first.flat.fill_(1)
    pool.empty(first)
    pool.empty(second)
    pool.fill(second)
    pool.fill(first)  # may have the other's memory now
    assert first.flat.isnan().all() or not moves
    first.flat.fill_(3)
    assert view.tolist() == [3, 3]
    assert taken is None or not (taken == 1).any()


def test_an_arena_cannot_free_more_than_was_taken() -> None:
    arena = Arena(CPU)
    arena.make(10, torch.float32, "host", "weights")
    arena.count(-40, "host", "weights")
    assert (arena.live_bytes("host"), arena.peak_bytes["host"]) == (0, 40)
    with pytest.raises(StateError, match="weights on the host: 8 bytes"):
        arena.count(-8, "host", "weights")


# --- gradients -----------------------------------------------------------------------------------------------------


def make_flow(
    chunks: list[Chunk], block_count: int = 2, *, lanes: Lanes | None = None, overlap: bool = True
) -> tuple[GradientFlow, Arena]:
    arena = Arena(CPU)
    lanes = lanes or make_lanes(CPU, Emulation(delay_s=0.002))
    buffers = HostBuffers(arena)
    buffers.add(BufferKind(SUMMANDS, "gradients", 0, 2, at_once=False))
    options = FlowOptions(block_count=block_count, block_bytes=384 * 4, overlap=overlap)
    return GradientFlow(chunks, arena, lanes, Group(), buffers, options), arena


def backward(flow: GradientFlow, arrivals: list[tuple[Chunk, int, float]]) -> None:
    flow.begin()
    for chunk, slot, value in arrivals:
        shape = chunk.slots[slot].shape
        flow.take(chunk, chunk.slots[slot], torch.full(shape, value))
    flow.flush()
    flow.settle()


def held(flow: GradientFlow, chunk: Chunk, slot: int) -> set[float]:
    start, numel = chunk.slots[slot].offset, chunk.slots[slot].numel
    return set(flow.by_chunk[chunk.index].memory.tensor[start : start + numel].tolist())


def test_more_chunks_open_than_blocks_take_more_and_say_so() -> None:
    chunks = [make_chunk(index) for index in range(4)]
    flow, arena = make_flow(chunks, block_count=1)
    backward(flow, [(chunk, slot, 1.0) for slot in (0, 1, 2) for chunk in chunks])
    assert flow.extra_blocks == 3
    assert arena.parts("device")["gradient_blocks"] == 4 * 384 * 4


def test_a_block_is_not_written_to_before_it_has_left() -> None:
    """A flow of two chunks and one block; the offload of the first is held back."""
    chunks = [make_chunk(0), make_chunk(1)]
    gate, lanes = threading.Event(), make_lanes(CPU)
    flow, _ = make_flow(chunks, block_count=1, lanes=lanes)
    lanes.offload.submit(gate.wait)
    threading.Timer(0.1, gate.set).start()  # code that does not wait is past it by then
    backward(flow, [(chunk, slot, 1.0 + chunk.index) for chunk in chunks for slot in (0, 1, 2)])
    assert [held(flow, chunk, 0) for chunk in chunks] == [{1.0}, {2.0}]
    assert flow.extra_blocks == 0


@pytest.mark.parametrize("zeros", [True, False])
def test_new_gradients_and_zeros_wait_for_the_step_that_reads_the_last_ones(zeros: bool) -> None:
    chunk = make_chunk()
    lanes = make_lanes(CPU)
    flow, _ = make_flow([chunk], lanes=lanes)
    backward(flow, [(chunk, slot, 1.0) for slot in (0, 1, 2)])
    gate, read = threading.Event(), []
    work, gradient = lambda: (gate.wait(), read.append(held(flow, chunk, 0))), flow.by_chunk[chunk.index].memory
    updated = lanes.host_adam.submit(work, reads=[gradient])
    threading.Timer(0.1, gate.set).start()
    flow.clear()
    assert not gate.is_set()
    if zeros:
        flow.hold([chunk.slots[0].name])
    else:
        backward(flow, [(chunk, slot, 2.0) for slot in (0, 1, 2)])
    updated.synchronize()
    assert read == [{1.0}]
    assert held(flow, chunk, 0) == {0.0 if zeros else 2.0}


# --- parameters ----------------------------------------------------------------------------------------------------
