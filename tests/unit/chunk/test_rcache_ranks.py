"""Several ranks: whatever a rank's data skips, it issues the same collectives as the others, and its bytes are right.

Each rank of two runs by itself here, with a group that notes what it would issue; the notes of both must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import elixir.access.interception  # noqa: F401  registers what operators on marked memory reach
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients.gradient_flow import FlowOptions, GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import HostBuffers
from elixir.chunk.lanes import StepCounts, make_lanes
from elixir.chunk.memory import Arena, BlockPool
from elixir.chunk.rcache import RCache
from elixir.errors import RankError
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from elixir.schedule import Schedule

CPU = torch.device("cpu")
NUMEL = 128
Uses = list[tuple[int, ...]]


class Noting(Group):
    """Two ranks whose shards are equal, of which this process is one; or one rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.issued: list[str] = []
        self.fails = 0
        """How many of the next gathers raise."""

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, what: str = "weights") -> None:
        self.issued.append(what)
        if self.fails:
            self.fails -= 1
            raise RankError(f"{what} did not come")
        whole.copy_(shard.clone().repeat(self.size))

    def exchange(self, what: str, value: Any) -> list[Any]:
        self.issued.append(what)
        return [value] * self.size

    @property
    def gathered(self) -> list[int]:
        """The chunks, in order."""
        return [int(what.removeprefix("chunk ")) for what in self.issued if what.removeprefix("chunk ").isdigit()]


class NotingFlow(GradientFlow):
    """Gradients of no chunk; notes what the cache reports to it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted: list[str] = []

    def begin(self) -> None:
        self.noted.append("begin")

    def leave(self, position: int) -> None:
        self.noted.append(f"leave {position}")

    def enter(self, position: int) -> None:
        self.noted.append(f"enter {position}")


class Rank:
    """One rank's cache; chunk i holds the number i."""

    def __init__(self, uses: Uses, turn: int, blocks: int, depth: int = 0, size: int = 2, **options: Any) -> None:
        self.group, self.lanes = Noting(size), make_lanes(CPU)
        arena, chunks = Arena(CPU), []
        for index in range(1 + max(max(use, default=0) for use in uses)):
            slots = (ParamSlot(f"p{index}", 0, NUMEL),)
            plan = ChunkPlan("float32", True, NUMEL, slots, "host", "host", resident=False)
            chunks.append(Chunk(index, plan, [nn.Parameter(torch.zeros(NUMEL))], rank=0, world_size=size))
            chunks[-1].shard = torch.full((NUMEL // size,), float(index))
            chunks[-1].hold_placeholders()
        buffers, flow = HostBuffers(arena), FlowOptions(block_count=0, block_bytes=0)
        self.flow = NotingFlow([], arena, self.lanes, self.group, buffers, flow)
        pool = BlockPool(arena, blocks, NUMEL * 4, poison=True)
        self._uses, self._turn, self.schedule = uses, turn, Schedule(uses, depth)
        self.chunks = chunks
        self.cache = RCache(
            chunks, self.schedule, pool, self.lanes, buffers, self.group, self.flow, backward_from=turn, **options
        )

    def take_counts(self) -> StepCounts:
        """Counts since they were last taken."""
        found = replace(self.lanes.counts)
        self.lanes.counts.reset()
        return found

    def use(self, *chunks: int, pinned: bool = False) -> None:
        self.cache.acquire(chunks)
        assert all((self.chunks[chunk].filled == chunk).all() for chunk in chunks)
        if not pinned:
            self.cache.unpin(chunks)

    def step(self, skipped: Sequence[int] = (), backwards: int = 1) -> None:
        """A forward and backwards over it, without the uses with these numbers."""
        self.cache.begin()
        for number, chunks in enumerate(self._uses[: self._turn]):
            if number not in skipped:
                self.use(*chunks)
        self.cache.end_forward()
        for _ in range(backwards):
            self.cache.enter_backward()
            for number, chunks in enumerate(self._uses[self._turn :], self._turn):
                if number not in skipped:
                    self.use(*chunks)
            self.cache.end_backward()

    def call(self, *uses: tuple[int, ...], skipped: Sequence[int] = ()) -> None:
        """A call of a model with these uses, without those with these numbers."""
        self.cache.begin_call(frozenset(chunk for chunks in uses for chunk in chunks))
        for number, chunks in enumerate(uses):
            if number not in skipped:
                self.use(*chunks)
        self.cache.end_call()

    def close(self) -> None:
        self.cache.invalidate()
        self.lanes.close()


@st.composite
def steps(draw: st.DrawFn) -> tuple[Uses, int]:
    """Uses of chunks, and the number of the first one in backward."""
    chunk = st.integers(0, draw(st.integers(0, 5)))
    uses = draw(st.lists(st.lists(chunk, min_size=1, max_size=2, unique=True).map(tuple), min_size=1, max_size=16))
    return uses, draw(st.integers(0, len(uses)))


@settings(max_examples=50)
@given(
    step=steps(),
    depth=st.integers(0, 2),
    extra=st.integers(0, 2),
    skipped=st.sets(st.integers(0, 15)),
    backwards=st.integers(1, 2),
    evict_always=st.booleans(),
)
def test_ranks_issue_the_same_whatever_their_data_skips(
    step: tuple[Uses, int], depth: int, extra: int, skipped: set[int], backwards: int, evict_always: bool
) -> None:
    uses, turn = step
    blocks = Schedule(uses, depth).min_blocks + extra
    ranks = [Rank(uses, turn, blocks, depth, evict_always=evict_always) for _ in range(2)]
    for rank, left_out in zip(ranks, ((), skipped), strict=True):
        rank.step(tuple(left_out), backwards)
        counts = rank.take_counts()
        assert counts.deviations == counts.demand_loads == 0
        rank.close()
    assert ranks[0].group.issued == ranks[1].group.issued
    whole = ranks[0].schedule.simulate(blocks)
    if backwards == 1 and not evict_always:
        assert tuple(ranks[0].group.gathered) == whole.chunks
        assert counts.hits == whole.hits


def test_what_is_evicted_after_each_use_is_gathered_for_each() -> None:
    rank = Rank([(0,), (1,), (0,), (1,)], 2, 2, evict_always=True)
    rank.step()
    rank.close()
    assert rank.group.issued == ["forward", "chunk 0", "chunk 1", "backward", "chunk 0", "chunk 1"]


def test_a_second_backward_walks_the_order_from_where_backward_begins() -> None:
    rank = Rank([(0,), (1,), (2,), (1,), (0,)], 3, 1)
    rank.step(backwards=2)
    rank.close()
    first = ["forward", "chunk 0", "chunk 1", "chunk 2", "backward", "chunk 1", "chunk 0"]
    assert rank.group.issued == [*first, "backward", "chunk 1", "chunk 0"]
    rank = Rank([(0,), (1,)], 1, 1)
    rank.step(backwards=2)
    rank.close()
    assert rank.flow.noted == ["begin", "leave 1", "enter 1"] * 2


@pytest.mark.parametrize("pinned", [False, True])
def test_ranks_agree_if_what_the_order_evicts_is_in_use_on_one(pinned: bool) -> None:
    """Chunk 0 is not needed again, chunk 1 is; but this rank still reads chunk 0."""
    rank = Rank([(0,), (1,), (2,), (1,)], 4, 2)
    rank.cache.begin()
    rank.use(0, pinned=pinned)
    rank.use(1)
    rank.use(2)
    rank.use(1)
    if pinned:
        rank.use(0)
        rank.cache.unpin([0])
    rank.close()
    said = ["chunk 0, which stays in its block though the order needs it"] * pinned
    again = ["chunk 1"] * pinned
    assert rank.group.issued[:6] == ["forward", "chunk 0", "chunk 1", *said, "chunk 2", *again][:6]


MODELS: dict[str, tuple[tuple[int, ...], ...]] = {"first": ((0,), (1,)), "second": ((2,), (3, 4), (2,))}


@pytest.mark.parametrize(
    ("calls", "gathered"),
    [
        ([("first", ()), ("second", ())], [[0, 1], [2, 3, 4]]),
        ([("second", ()), ("second", ())], [[2, 3, 4], []]),  # its chunks are there still
        ([("second", ()), ("first", ()), ("second", ())], [[2, 3, 4], [0, 1], [4]]),  # 0 was needed no more
        ([("first", (1,)), ("second", (0, 2))], [[0, 1], [2, 3, 4]]),  # other ranks do not skip it
        ([("second", (1, 2)), ("first", (0,))], [[2, 3, 4], [0, 1]]),
    ],
)
def test_ranks_gather_what_a_call_needs_whatever_their_data_skips(
    calls: list[tuple[str, tuple[int, ...]]], gathered: list[list[int]]
) -> None:
    rank = Rank([use for uses in MODELS.values() for use in uses], 5, 3)
    for number, (model, skipped) in enumerate(calls):
        rank.group.issued.clear()
        rank.call(*MODELS[model], skipped=skipped)
        rank.lanes.network.ask(lambda: None)  # what it was given has been issued
        assert rank.group.issued == ["a call", *(f"chunk {chunk}" for chunk in gathered[number])]
        assert set(rank.cache.held) >= set(MODELS[model][-1])
    counts = rank.take_counts()
    assert (counts.calls, counts.demand_loads, counts.deviations) == (len(calls), 0, 0)
    rank.cache.disturbed()
    rank.group.issued.clear()
    rank.call(*MODELS["first"])
    rank.lanes.network.ask(lambda: None)
    assert rank.group.issued[:2] == ["the first call after an error", "a call"]
    assert not rank.cache.is_disturbed
    rank.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_transfer_that_cannot_begin_leaves_its_block_to_the_next(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank([(0,), (1,)], 2, 1, size=size)
    rank.cache.begin()

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no more threads")

    with monkeypatch.context() as patch:
        patch.setattr(rank.lanes.fetch, "submit", refused)
        with pytest.raises(RuntimeError, match="no more threads"):
            rank.use(0)
    assert rank.cache.held == ()
    rank.cache.disturbed()
    rank.step()
    rank.close()
