"""Matrices of which several ranks have parts: each is made orthogonal by one rank, in memory that the plan counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.chunk import Slot
from elixir.chunk.memory import Memory
from elixir.optimizer_states import DIRECTION_BYTES
from elixir.plan.chunk_plan import ParamSlot
from elixir.plan.matrices import room_bytes, stage_numel, stages
from elixir.wrapper.step.matrix_rule import Exchange, MatrixRoom
from tests.common.one_shard import transposed, weights_of

SHAPES = ((4, 6), (6, 4), (2, 2), (2, 2))
SHARD_NUMEL = 28
"""The first rank has the first matrix and 4 elements of the second, the other rank all others."""
Sent = Sequence[tuple[torch.Tensor, int]]


def like_it(direction: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    return direction.neg()


def in_rows(direction: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    return direction.neg().contiguous()


def in_rows_of_the_room(direction: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    return room[: direction.numel()].view(direction.shape).copy_(direction.neg().contiguous())


def room_of(home: str) -> tuple[MatrixRoom, list[tuple[int, str, str]]]:
    """The room of a plan for two ranks, and what was allocated for it."""
    made: list[tuple[int, str, str]] = []

    def make(numel: int, dtype: torch.dtype, where: str, kind: str) -> Memory:
        made.append((numel, where, kind))
        return Memory(torch.zeros(numel, dtype=dtype))

    arena: Any = SimpleNamespace(make=make, device=torch.device("cpu"))
    chunks = [
        SimpleNamespace(matrices=SHAPES, numel=2 * SHARD_NUMEL, update_home=home),
        SimpleNamespace(matrices=(), numel=1000, update_home="host"),
    ]
    plan: Any = SimpleNamespace(shards=2, chunks=chunks)
    return MatrixRoom(arena, plan), made


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_room_has_the_memory_that_a_plan_counts(home: str) -> None:
    _, made = room_of(home)
    size = room_bytes([(SHAPES, SHARD_NUMEL), ((), 500)], 2) // DIRECTION_BYTES
    staging = [(stage_numel(SHAPES, SHARD_NUMEL, 2), "host", "matrix_staging")] * stages(2)
    assert made == [(size, "device", "matrix_room"), *(staging if home == "host" else [])]


@pytest.mark.parametrize("orthogonal", [like_it, in_rows, in_rows_of_the_room])
def test_each_matrix_passes_through_one_rank_and_comes_back_in_parts(orthogonal: Callable[..., torch.Tensor]) -> None:
    posts: dict[int, Sent] = {}
    barrier, said, errors = threading.Barrier(2, timeout=20), set[tuple[int, str]](), list[Exception]()
    weights = [weights_of((4, 6))[0], transposed(6, 4), *weights_of((2, 2), (2, 2))]
    group_of: dict[nn.Parameter, int] = dict.fromkeys(weights[:3], 0)  # the last is another optimizer's
    rule: Any = SimpleNamespace(orthogonal=lambda direction, room, options: orthogonal(direction, room))
    expected = torch.arange(1.0, 57.0)
    expected[:52] *= -1
    found = torch.zeros(56)

    def work(rank: int) -> None:
        def swap(sent: Sent, received: Sent, what: str) -> None:
            said.add((rank, what))
            posts[rank] = [(part.clone(), to) for part, to in sent]
            barrier.wait()
            coming = [part for part, to in posts[1 - rank] if to == rank]
            for (out, source), part in zip(received, coming, strict=True):
                assert source == 1 - rank
                out.copy_(part)
            barrier.wait()

        slots, offset = [], 0
        for place, weight in enumerate(weights):
            slots.append(Slot.of(weight, ParamSlot(f"w{place}", offset, weight.numel()), weight.dtype, "cpu"))
            offset += weight.numel()
        mine = slice(rank * SHARD_NUMEL, (rank + 1) * SHARD_NUMEL)
        chunk: Any = SimpleNamespace(
            index=5, slots=slots, shard_numel=SHARD_NUMEL, shard_start=mine.start, plan=SimpleNamespace(matrices=SHAPES)
        )
        group: Any = SimpleNamespace(shards=2, shard=rank, swap=swap)
        exchange = Exchange(chunk, group, room_of("device")[0], group_of)
        exchange.directions.copy_(torch.arange(1.0, 57.0)[mine])
        try:
            assert exchange.received_bytes == (4 + 4) * DIRECTION_BYTES
            exchange.run(rule, [{}])
        except Exception as error:
            errors.append(error)
            barrier.abort()
        found[mine] = exchange.directions.float()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found.tolist() == expected.tolist()
    assert said == {(rank, f"{how}matrices of chunk 5") for rank in range(2) for how in ("", "orthogonal ")}
