"""Ranks of one machine: the host's Adam of each is bound to separate cores, everything else stays free."""

from __future__ import annotations

import os

import pytest
import torch

from tests.common import inside
from tests.common.ddp import Twins, batch_of
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


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
