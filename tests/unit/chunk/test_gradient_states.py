"""The states of a chunk's gradient, and what holds it in each."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients.chunk_gradient import ChunkGradient, GradientBlocks, GradState
from elixir.chunk.lanes import make_lanes
from elixir.chunk.memory import Arena
from elixir.errors import StateError
from tests.common import inside
from tests.unit.chunk.test_chunks import backward, make_chunk, make_flow

CPU = torch.device("cpu")


@pytest.mark.parametrize(("one", "other"), list(itertools.product(GradState, GradState)))
def test_only_the_changes_of_the_table_are_allowed(one: GradState, other: GradState) -> None:
    gradient = ChunkGradient(make_chunk(5), Arena(CPU))
    gradient.state = one
    if other in inside.transitions(ChunkGradient)[one]:
        gradient.to(other)
        assert gradient.state is other
    else:
        with pytest.raises(StateError, match="gradient of chunk 5"):
            gradient.to(other)
        assert gradient.state is one


def test_a_gradient_goes_through_its_states() -> None:
    chunk = make_chunk(0)
    flow, _ = make_flow([chunk])
    gradient = flow.by_chunk[0]
    seen = [gradient.state]
    for _ in range(2):
        flow.begin()
        for slot in chunk.slots:
            flow.take(chunk, slot, torch.ones(slot.shape))
            seen.append(gradient.state)
        flow.flush()
    flow.settle()
    none, arriving, home, adding = GradState.NONE, GradState.ARRIVING, GradState.HOME, GradState.ADDING
    assert seen == [none, arriving, arriving, home, adding, adding, home]
    flow.clear()
    assert gradient.state is none
    assert not flow.any_held()


def test_a_gradient_that_is_dropped_while_more_arrive_leaves_what_arrives() -> None:
    chunk, lanes = make_chunk(0), make_lanes(CPU)
    flow, _ = make_flow([chunk], lanes=lanes)
    backward(flow, [(chunk, slot, 1.0) for slot in (0, 1, 2)])
    flow.begin()
    flow.take(chunk, chunk.slots[0], torch.full(chunk.slots[0].shape, 4.0))
    gradient = flow.by_chunk[0]
    for slot in chunk.slots[1:]:
        flow.drop(chunk, slot.name)
    assert gradient.state is GradState.ADDING
    gradient.drop(chunk.slots[0].name, lanes.offload, one_rank=True)
    assert gradient.state is GradState.ARRIVING
    flow.flush()
    flow.settle()
    assert gradient.state is GradState.HOME
    assert set(gradient.memory.tensor[: chunk.slots[0].numel].tolist()) == {4.0}


def test_zeros_for_other_ranks_are_not_taken_for_what_was_dropped_before() -> None:
    chunk, lanes = make_chunk(0), make_lanes(CPU)
    flow, _ = make_flow([chunk], lanes=lanes)
    backward(flow, [(chunk, slot, 1.0) for slot in (0, 1, 2)])
    gradient = flow.by_chunk[0]
    for slot in chunk.slots:
        gradient.drop(slot.name, lanes.offload, one_rank=False)
    assert gradient.state is GradState.NONE
    gradient.hold_zeros()
    gradient.drop(chunk.slots[0].name, lanes.offload, one_rank=False)
    assert gradient.state is GradState.HOME
    gradient.clear()
    gradient.hold_zeros()
    for slot in chunk.slots[1:]:
        gradient.drop(slot.name, lanes.offload, one_rank=False)
    assert gradient.state is GradState.HOME


def test_blocks_that_miss_gradients_leave_in_the_order_in_which_they_were_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = [make_chunk(index) for index in range(3)]
    flow, _ = make_flow(chunks, block_count=3)
    sent, to = list[int](), ChunkGradient.to

    def noted(gradient: ChunkGradient, state: GradState) -> None:
        sent.extend([gradient.chunk.index] * (state is GradState.HOME))
        to(gradient, state)

    monkeypatch.setattr(ChunkGradient, "to", noted)
    backward(flow, [(chunks[index], 0, 1.0) for index in (2, 0, 1)])
    assert sent == [2, 0, 1]


def test_a_gradient_larger_than_a_block_waits_for_others_like_it_and_for_no_block() -> None:
    small, large, waited = make_chunk(0), make_chunk(1, ((4, 8),) * 5), list[str]()
    blocks = GradientBlocks(Arena(CPU), 1, small.weight_bytes)

    def leave(chunk: Chunk, what: str) -> None:
        ticket: Any = mock.Mock(wait=lambda: waited.append(what))
        opened = blocks.open(chunk)
        opened.memory.writer = ticket
        blocks.leave(opened)

    leave(small, "block")
    leave(large, "large")
    assert not waited
    leave(large, "another")
    assert waited == ["block", "large"]  # in the order in which they left


def test_memory_of_work_that_failed_is_given_back_once_that_is_known() -> None:
    chunk, lanes = make_chunk(0), make_lanes(CPU)
    blocks = GradientBlocks(Arena(CPU), 3, chunk.weight_bytes)
    taken = [blocks.open(chunk) for _ in range(3)]
    assert blocks.are_taken
    for opened, work in zip(taken, (lambda: None, lambda: [][0], lambda: None), strict=True):
        lanes.offload.submit(work, reads=[opened.memory])
        blocks.leave(opened)
    lanes.drain()
    blocks.reclaim_all()
    assert all(blocks.open(chunk).memory is opened.memory for opened in taken)
    assert (blocks.extra, type(lanes.fate.error)) == (0, IndexError)
    lanes.close()
