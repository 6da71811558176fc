"""Writes to a chunk's weights: what each of its memories holds afterwards, on one rank and on several, with masters or
without."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from elixir.chunk.chunk import Chunk, ChunkState, take_back
from elixir.chunk.gradients.chunk_gradient import ChunkGradient, GradientBlocks
from elixir.chunk.lanes import make_lanes
from elixir.chunk.memory import Arena, ChunkStorage, Memory
from elixir.errors import InputError
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from tests.unit.chunk.test_chunks import make_chunk, make_flow

CPU = torch.device("cpu")
SHAPES = ((2, 3), (0,), (5,), (3,))
OFFSETS = (0, 6, 8, 13)
"""There is a gap before the third parameter, and two parameters are next to each other; the last element is nobody's."""
NUMEL = 18
RANKS = (1, 2, 3)
FINE = 1.0 + 2.0**-12
"""Rounds to 1 in bfloat16."""


@dataclass
class Made:
    chunk: Chunk
    announced: list[int]
    """One entry for each time that a checkpoint was asked to copy first."""


def made(rank: int = 0, ranks: int = 1, *, resident: bool = True, masters: bool = True) -> Made:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    slots = tuple(ParamSlot(f"p{i}", at, p.numel()) for i, (at, p) in enumerate(zip(OFFSETS, parameters, strict=True)))
    home: Any = "device" if resident else "host"
    plan = ChunkPlan("bfloat16", True, NUMEL, slots, weight_home=home, state_home="host", resident=resident)
    chunk = Chunk(3, plan, parameters, rank=rank, world_size=ranks)
    if resident:
        chunk.weights = torch.zeros(NUMEL, dtype=torch.bfloat16)
    else:
        chunk.shard = torch.zeros(NUMEL // ranks, dtype=torch.bfloat16)
    if masters:
        chunk.masters = torch.zeros(NUMEL // ranks)
    chunk.attach()
    found = Made(chunk, [])
    chunk.before_write = lambda: found.announced.append(1)
    return found


@pytest.mark.parametrize(("ranks", "resident", "masters"), list(itertools.product(RANKS, (True, False), (True, False))))
def test_masters_follow_weights_that_they_do_not_round_to(ranks: int, resident: bool, masters: bool) -> None:
    """Gathered weights are taken home: masters keep their digits where the weights say the same."""
    gathered = torch.zeros(NUMEL, dtype=torch.bfloat16)
    gathered[8:13] = torch.tensor([1.0, 1.0, 2.0, 1.0, 3.0])
    gathered[:6] = 9.0
    for rank in range(ranks):
        it = made(rank, ranks, resident=resident, masters=masters)
        chunk = it.chunk
        chunk.write(chunk.slots[2], torch.full((5,), FINE))
        chunk.take(gathered, [chunk.slots[2]])
        assert len(it.announced) == chunk.writes >= 2
        expected = torch.zeros(NUMEL)
        expected[8:13] = torch.tensor([FINE, FINE, 2.0, FINE, 3.0])
        assert torch.equal(chunk.shard_weights, expected.bfloat16()[chunk.mine])
        if chunk.masters is not None:
            assert torch.equal(chunk.masters, expected[chunk.mine])
        count = len(it.announced)
        chunk.follow_writes()
        assert len(it.announced) == count, "nothing was written since"
        if chunk.masters is not None and 8 in range(NUMEL)[chunk.mine]:
            chunk.shard_weights[8 - chunk.shard_start] = 5.0
            chunk.follow_writes()
            assert len(it.announced) == chunk.writes == count + 1
            assert chunk.masters[8 - chunk.shard_start] == 5.0


def test_a_write_to_a_block_that_is_announced_is_kept_and_no_error() -> None:
    it = made(resident=False)
    chunk, memory = it.chunk, torch.zeros(NUMEL, dtype=torch.bfloat16)
    chunk.block = ChunkStorage(NUMEL, torch.bfloat16, memory)
    memory = chunk.block.flat
    chunk.to(ChunkState.FETCHING)
    chunk.to(ChunkState.CACHED, memory)
    with torch.no_grad():
        chunk.slots[3].parameter.fill_(2.0)
    chunk.take_written(chunk.slots[3].parameter)
    chunk.to(ChunkState.HOME)
    assert chunk.shard is not None
    assert chunk.shard.tolist() == [0.0] * 13 + [2.0] * 3 + [0.0] * 2


def test_parameters_with_other_memory_are_found_and_taken_back() -> None:
    """Two parameters exchange their values by ``data``; the others are left alone, and copied nowhere."""
    it = made()
    chunk, whole = it.chunk, it.chunk.weights
    assert whole is not None
    whole.copy_(torch.arange(float(NUMEL)))
    assert chunk.moved(whole) == []
    assert chunk.with_moved(whole) is whole
    third, fourth = chunk.slots[2].parameter, chunk.slots[3].parameter
    third.data, fourth.data = torch.full((5,), 7.0, dtype=torch.bfloat16), third.data[1:4]
    assert [slot.name for slot in chunk.moved(whole)] == ["p2", "p3"]
    assert [slot.name for slot in chunk.moved(whole, chunk.slots[3:])] == ["p3"]
    expected = [*range(8), *[7] * 5, 9, 10, 11, 16, 17]
    assert chunk.with_moved(whole).tolist() == expected
    assert whole.tolist() == list(range(NUMEL))
    take_back([(chunk, whole, chunk.slots)])
    assert whole.tolist() == expected
    assert chunk.moved(whole) == []
    assert (chunk.taken_back, chunk.data_writes) == (2, 2)
    assert chunk.writes == len(it.announced) == 2, "before each of them changes"
    first = chunk.slots[0].parameter
    with torch.no_grad():
        for other in (first.data[:1], first.data.view(3, 2), first.data.as_strided((2, 3), (1, 2)), first.data.half()):
            first.data = whole[:6].view(torch.float16).view(2, 3) if other.dtype == torch.float16 else other
            assert [slot.name for slot in chunk.moved(whole)] == ["p0"], "it begins at the same address"
            first.data = whole[:6].view(2, 3)
    assert chunk.moved(whole) == []
    third.data = torch.zeros(6, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"p2 was given \[6\] values of torch.bfloat16, its weights are \[5\]"):
        take_back([(chunk, whole, chunk.slots)])
    third.data = torch.zeros(5)
    with pytest.raises(InputError, match=r"\[5\] values of torch.float32"):
        chunk.with_moved(whole)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("home", "foreseen"), list(itertools.product(("host", "device"), (True, False))))
def test_memory_for_gradients_is_there_from_the_start_on_the_host_if_a_plan_foresees_any(
    home: Any, foreseen: bool
) -> None:
    slots = (ParamSlot("p", 0, 8),)
    order = 0 if foreseen else None
    plan = ChunkPlan("float32", True, 8, slots, "device", home, True, reduce_order=order)
    arena = Arena(CPU)
    gradient = ChunkGradient(Chunk(0, plan, [nn.Parameter(torch.zeros(8))], rank=0, world_size=2), arena)
    at_once = home == "host" and foreseen
    assert gradient.memory.tensor.numel() == (4 if at_once else 0)
    gradient.make_memory()
    gradient.make_memory()
    assert arena.parts(home) == {"gradients": 16}
    gradient.hold_zeros()
    gradient.clear()
    assert arena.parts(home) == ({"gradients": 16} if home == "host" else {})


def chunk_of(*shapes: tuple[int, ...]) -> Chunk:
    parameters, slots, at = [nn.Parameter(torch.zeros(shape)) for shape in shapes], list[ParamSlot](), 0
    for number, parameter in enumerate(parameters):
        slots.append(ParamSlot(f"p{number}", at, parameter.numel()))
        at += parameter.numel()
    plan = ChunkPlan("float32", True, at, tuple(slots), "host", "host", False)
    return Chunk(0, plan, parameters, rank=0, world_size=1)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_large_gradient_leaves_from_where_it_lies(overlap: bool) -> None:
    """Backward goes on meanwhile, or waits; then the plan counts the gradient with those of autograd."""
    chunk = chunk_of((20, 20))
    lanes = make_lanes(CPU)
    flow, arena = make_flow([chunk], lanes=lanes, overlap=overlap)
    blocks_bytes, gate = arena.parts("device")["gradient_blocks"], threading.Event()
    flow.begin()
    for times in (1, 2):
        gradient = torch.ones(20, 20)
        if overlap:
            gate.clear()
            lanes.offload.submit(gate.wait)
        flow.take(chunk, chunk.slots[0], gradient)
        assert arena.parts("device")["gradient_blocks"] == blocks_bytes + overlap * gradient.nbytes
        assert flow.by_chunk[0].opened is None
        if overlap:
            gradient.fill_(3.0)
        gate.set()
        flow.settle()
        assert flow.by_chunk[0].memory.tensor.unique().tolist() == [times * (3.0 if overlap else 1.0)]
        assert arena.parts("device")["gradient_blocks"] == blocks_bytes


def test_blocks_are_taken_only_while_gradients_arrive_in_all_of_them() -> None:
    chunk = make_chunk(0)
    blocks = GradientBlocks(Arena(CPU), 2, chunk.weight_bytes)
    assert not blocks.are_taken
    first = blocks.open(chunk)
    assert not blocks.are_taken
    blocks.open(chunk)
    assert blocks.are_taken
    blocks.give_back(first.memory)
    assert not blocks.are_taken
    assert blocks.open(chunk).memory is first.memory
    assert blocks.extra == 0


# --- layouts, files and disks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [True, False])
def test_gathered_weights_are_waited_for_if_they_stay(resident: bool) -> None:
    chunk, asked = made(resident=resident).chunk, list[str]()
    chunk.synchronize_weights()
    chunk.whole = Memory()
    chunk.whole.writer = mock.Mock(synchronize=lambda: asked.append("filled"))
    chunk.synchronize_weights()
    assert asked == ["filled"] * resident
