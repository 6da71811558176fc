"""Several micro-batches in a pass on several ranks: collectives of one micro-batch, and the numbers of DDP."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from elixir.errors import RankError
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.one_pass import Steps, batches, family, hf_loss, plan_for, stepping
from tests.common.parity import assert_as_planned
from tests.common.spawn import on_each_rank, run_ranks

COUNT = 3


def _averaged(name: str, steps: Steps) -> dict[str, torch.Tensor]:
    """Weights after training in plain PyTorch with gradients that ranks average once per step, as DDP does."""
    model = family(name)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for step in steps:
        for batch in step:
            (hf_loss(model, batch) / len(step)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def _plan(name: str, world_size: int, home: str, accumulation: int = COUNT) -> Plan:
    model, batch = family(name)(), batches(name, 1)[0][0]
    return plan_for(model, batch, accumulation=accumulation, world_size=world_size, home=home)


def _wrapped(name: str, plan: Plan) -> tuple[ElixirModule, ElixirOptimizer]:
    module = ElixirModule(family(name)(), plan, device="cpu")
    adam = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6)
    return module, ElixirOptimizer(module, adam, max_norm=0.5)


def _train(rank: int, world_size: int, name: str, home: str) -> None:
    moved = {}
    for count in (1, COUNT):
        steps = [step[rank * count :][:count] for step in batches(name, count * world_size)]
        plan = replace(_plan(name, world_size, home), accumulation=count)
        module, optimizer = _wrapped(name, plan)
        for step in steps:
            optimizer.accumulate(stepping(optimizer, hf_loss, count), step)
            optimizer.step()
            optimizer.zero_grad()
        report = assert_as_planned(module, ("network",))
        moved[count] = [report.observed[link] for link in ("loads", "network", "host_to_device", "device_to_host")]
        weights = module.state_dict()
        for key, value in _averaged(name, steps).items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=2e-5, msg=f"{key} of {name}")
        module.close()
    assert moved[1] == moved[COUNT]


@pytest.mark.parametrize(("name", "home"), [("llama", "cpu"), ("gpt2", "cuda")])
def test_ranks_gather_and_reduce_once(name: str, home: str) -> None:
    run_ranks(2, _train, name, home)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "mixtral"])
def test_four_ranks_gather_and_reduce_once(name: str) -> None:
    run_ranks(4, _train, name, "cpu")


@on_each_rank(2)
def test_an_error_in_one_micro_batch_on_one_rank_ends_all(rank: int, world_size: int) -> None:
    module, optimizer = _wrapped("llama", _plan("llama", world_size, "cpu"))
    step = batches("llama", COUNT)[0]
    right = stepping(optimizer, hf_loss, COUNT)

    def step_fn(model: torch.nn.Module, batch: object) -> torch.Tensor:
        if rank == 1 and batch is step[1]:
            raise ValueError("mine")
        return right(model, batch)

    def train() -> None:
        optimizer.accumulate(step_fn, step)
        optimizer.step()
        module.settle()

    with pytest.raises(ValueError if rank == 1 else RankError):
        train()
