"""Chunks move to other homes on several ranks alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.errors import InputError
from elixir.plan import Plan
from tests.common.ddp import Twins, batch_of
from tests.common.parity import mixed
from tests.common.spawn import run_ranks, run_to_end
from tests.common.tiny_models import tiny


def moved(plan: Plan, kind: str) -> Plan:
    if kind == "mixed":
        return mixed(plan)
    home = "host" if kind == "host" else "device"
    chunks = tuple(replace(c, resident=kind == "resident", weight_home=home, state_home=home) for c in plan.chunks)
    return replace(plan, chunks=chunks)


def training(rank: int, world_size: int) -> None:
    model = tiny("llama")
    twins = Twins(model, batch_of(model, rank, world_size), "host", max_norm=1.0)
    plan = twins.plan
    for kind in ("resident", "mixed", "device", "host", "mixed"):
        twins.train(2)
        twins.module.rehome(moved(plan, kind))
    twins.train(2)
    twins.check()
    twins.close()


def test_weights_are_those_of_ddp_wherever_they_live() -> None:
    run_ranks(2, training)


def disagreeing(rank: int, world_size: int) -> None:
    model = tiny("opt")
    twins = Twins(model, batch_of(model, rank, world_size), "host")
    with pytest.raises(InputError, match="has plan"):
        twins.module.rehome(moved(twins.plan, "device" if rank else "resident"))
    twins.train(1)
    twins.close()


def test_ranks_must_have_the_same_plan() -> None:
    assert [outcome.error for outcome in run_to_end(2, disagreeing)] == [None, None]
