"""Chunks move to other homes on several ranks alike."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from elixir.errors import InputError
from elixir.plan.plan import Plan
from tests.common.ddp import Twins, batch_of
from tests.common.parity import mixed, square_loss
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


def _given_back(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    inp = {"input": torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))}
    for kind in ("host", "mixed", "resident"):
        twins = Twins(model, inp, kind, loss=square_loss)
        twins.train(2)
        state = twins.module.state_dict()
        assert twins.module.release() is model
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        copy.deepcopy(model)(**inp)
    # A rank whose forward has raised does not wait for the others.
    twins = Twins(model, inp, "host", loss=square_loss)
    with pytest.raises(RuntimeError):
        twins.module(torch.ones(3))
    twins.close()
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow
def test_a_closed_model_is_whole_on_every_rank() -> None:
    run_ranks(2, _given_back)
