"""Ranks that part learn of it, and wait for no timeout; those of one machine share its cores."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elixir.chunk import group as chunk_group
from elixir.chunk.group import Group
from elixir.errors import RankError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.ddp import LR, Twins, batch_of, plan_for
from tests.common.parity import take_step
from tests.common.spawn import ALONE, on_each_rank, run_ranks, run_to_end
from tests.common.tiny_models import tiny

WIDTH = 24
LOOK_S, SLOW_S = 0.25, 1.2
"""A rank that is blocked looks where the others are after each of the first; the second is a few looks long."""


class ByRank(nn.Module):
    """Every rank runs another one of its modules."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.choices = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.choices[self.chosen](self.first(x).tanh())).square().mean()


def _loss(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    return model(inp["x"])  # type: ignore[no-any-return]


def _train(rank: int, world_size: int, kind: str) -> None:
    model = ByRank(rank)
    inp = {"x": torch.randn(4, WIDTH)}
    module = ElixirModule(model, plan_for(model, inp, kind, loss=_loss, split_number=5), device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR))
    for _ in range(3):
        take_step(optimizer, _loss(module, inp))
    module.close()


@pytest.mark.parametrize("kind", ["host", "device", "mixed"])
def test_modules_chosen_by_rank_end_at_once_on_both_ranks(kind: str) -> None:
    outcomes = run_to_end(2, _train, kind, **ALONE)
    for outcome in outcomes:
        assert "RankError" in str(outcome.error), outcome.error
    told = [str(outcome.error) for outcome in outcomes if "after" in str(outcome.error)]
    assert any("a use of chunks [3] that is not in the order" in text and "gather chunk" in text for text in told), told


def test_modules_chosen_by_rank_train_where_nothing_is_streamed() -> None:
    run_ranks(2, _train, "resident")


@on_each_rank(2, **ALONE)
def test_a_rank_that_is_slow_has_not_parted(rank: int, world_size: int) -> None:
    chunk_group._LOOK_S = LOOK_S
    model = ByRank(0)
    inp = {"x": torch.randn(4, WIDTH)}
    module = ElixirModule(model, plan_for(model, inp, "host", loss=_loss, split_number=5), device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=LR))
    for step in range(2):
        if rank == 1 and step == 1:
            model.last.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
        take_step(optimizer, _loss(module, inp))
    module.close()


def _gather(group: Group, what: str) -> None:
    group.gather(torch.empty(group.size * 4), torch.ones(4), what)


def _part(rank: int, group: Group) -> None:
    if rank:
        _gather(group, "chunk 2")
        _gather(group, "chunk 3")
    else:
        _gather(group, "chunk 1")  # has the size of rank 1's, so gloo is content
        group.send_from_rank_0(torch.ones(4))


def _first_wrong_place(rank: int, world_size: int) -> str:
    group = Group()
    group.exchange("begin", None)
    _gather(group, "chunk 0")
    with pytest.raises(RankError) as raised:
        _part(rank, group)
    with pytest.raises(RankError):
        group.exchange("more", None)
    group.close()  # waits for nothing, though gloo still waits for the other rank
    dist.barrier()  # the other must not learn it from this rank's end
    return str(raised.value)


def test_the_error_names_the_first_place_and_nobody_waits_to_close() -> None:
    for told in run_ranks(2, _first_wrong_place, **ALONE):
        assert "'gather chunk 1'" in told, told
        assert "'gather chunk 2'" in told, told
        assert "after 2 collectives" in told, told


def _data_against_data(rank: int, world_size: int) -> str:
    chunk_group._LOOK_S = LOOK_S
    group = Group()
    if rank == 1:
        time.sleep(SLOW_S)  # the others must find out without this rank, which has issued nothing yet
    with pytest.raises(RankError) as raised:
        group.send_from_rank_0(torch.ones(4)) if rank == 2 else _gather(group, "weights")
    group.close()
    dist.barrier()
    return str(raised.value)


def test_two_collectives_of_data_that_wait_for_each_other() -> None:
    for told in run_ranks(3, _data_against_data, **ALONE):
        assert "'gather weights'" in told, told
        assert "'send from rank 0'" in told, told


def _cores(rank: int, world_size: int, bind: str) -> tuple[set[int], set[int], set[int], int, int]:
    os.environ["ELIXIR_BIND"] = bind
    before = os.sched_getaffinity(0)
    model = tiny("opt")
    twins = Twins(model, batch_of(model, rank, world_size), "host")
    twins.train(1)
    found: list[tuple[set[int], int]] = []
    lane = inside.lane(twins.module, "host_adam")
    lane.submit(lambda: found.append((os.sched_getaffinity(0), torch.get_num_threads()))).wait()
    twins.close()
    return before, os.sched_getaffinity(0), found[0][0], found[0][1], torch.get_num_threads()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="nothing can be bound")
@pytest.mark.parametrize("bind", ["1", "0"])
def test_adam_is_bound_to_a_part_of_the_cores_unless_told_not_to(bind: str) -> None:
    answers = run_ranks(2, _cores, bind)
    for before, after, lane, threads, compute in answers:
        assert after == before
        assert threads >= 1 == compute
        assert lane <= before if bind == "1" else lane == before
    first, second = (answer[2] for answer in answers)
    if bind == "1" and len(answers[0][0]) > 1:
        assert first.isdisjoint(second)
        assert first | second == answers[0][0]
