"""Compiled layers on two ranks: the bits, graphs and breaks of compiled layers under DDP, and the plan's traffic."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from elixir.access.compiled_units import compiled_units
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.run_options import Debug
from tests.common.ddp import plan_for
from tests.common.parity import assert_as_planned, case
from tests.common.spawn import run_ranks
from tests.unit.wrapper.test_compiled_layers import CHECKPOINTS, LISTS, compiled, counted, fresh, train

KINDS = ("host", "mixed", "resident")
ALL = [(name, "aot_eager") for name in LISTS] + [(name, "inductor") for name in ("opt", "gpt2", "llama")]
TRAFFIC = ("loads", "network", "host_to_device", "device_to_host")


def _check(rank: int, world_size: int, name: str, backend: str, checkpoint: str, kind: str) -> None:
    it = case(name, checkpoint)
    inp = {key: value[rank::world_size].contiguous() for key, value in it.inp.items()}
    mine = copy.copy(it)
    object.__setattr__(mine, "inp", inp)
    plain = DistributedDataParallel(compiled(copy.deepcopy(it.model), backend))
    plan = plan_for(compiled(it.model, backend), inp, kind, loss=it.loss)
    assert plan.step.compiled == tuple(compiled_units(it.model).values())
    fresh()
    wanted = train(mine, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    expected = counted()
    assert expected[0] > 0
    fresh()
    model = ElixirModule(it.model, plan, device="cpu", debug=Debug(poison=True))
    found = train(mine, model, ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    assert found == wanted
    state = model.state_dict()
    assert [key for key, value in plain.module.state_dict().items() if not torch.equal(state[key], value)] == []
    assert counted()[0] <= expected[0]
    assert counted()[1] <= expected[1]
    # The other kinds change homes, and what they predict is of the plan before.
    assert_as_planned(model, TRAFFIC if kind == "host" else ())
    with torch.no_grad():
        model.eval()
        model(**inp)
    model.close()


def _check_all(rank: int, world_size: int, name: str, backend: str, ways: list[tuple[str, str]]) -> None:
    failed: dict[Any, str] = {}
    for checkpoint, kind in ways:
        try:
            _check(rank, world_size, name, backend, checkpoint, kind)
        except AssertionError as error:  # the other rank has the same numbers, so goes on as well
            failed[checkpoint, kind] = str(error).split("\n")[0]
    assert not failed, failed


@pytest.mark.parametrize(("kind", "checkpoint"), [("host", "non-reentrant"), ("mixed", "none")])
def test_same_bits_as_compiled_layers_under_ddp(kind: str, checkpoint: str) -> None:
    run_ranks(2, _check, "llama", "aot_eager", checkpoint, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), ALL)
def test_same_bits_of_every_family(name: str, backend: str) -> None:
    checkpoints = CHECKPOINTS if name not in ("encoder", "t5") else ("none",)
    ways = [(checkpoint, kind) for checkpoint in checkpoints for kind in KINDS]
    run_ranks(2, _check_all, name, backend, ways, wait_s=600.0)
