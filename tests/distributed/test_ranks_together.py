"""Two ranks train a policy next to its reference as DDP does, each model sharded over both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import elixir
from elixir.models.together import Together
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny

STEPS = 3


def losses(rank: int, world_size: int, order: str, memory: str | None) -> tuple[list[float], str]:
    policy = tiny("llama", layers=3, positions=64)
    models = elixir.together(
        policy=policy, reference=tiny("llama", layers=3, positions=64, seed=1).requires_grad_(False)
    )
    optimizer: Any = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    def loss(models: Any, inp: dict[str, torch.Tensor]) -> torch.Tensor:
        if order == "policy first":
            found = models.policy(**inp).loss
        with torch.no_grad():
            reference = models.reference(**inp).loss
        if order == "reference first":
            found = models.policy(**inp).loss
        return (found - reference + 0.1) ** 2

    def step(models: Together, inp: dict[str, torch.Tensor]) -> None:
        loss(models, inp).backward()

    def batch(number: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, 128, (2, 24), generator=torch.Generator().manual_seed(number * world_size + rank))
        return {"input_ids": ids, "labels": ids}

    model: Any = models
    if memory is None:
        models.policy = DistributedDataParallel(policy)
    else:
        model, optimizer = elixir.wrap(
            models, optimizer, inp=batch(0), step_fn=step, hardware="cpu", host_budget="1GiB", device_memory="1GiB",
            placement=memory, replan=False,
        )  # fmt: skip
    found, odd = [], ""
    for number in range(STEPS):
        value = loss(model, batch(number))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    if memory is not None:
        report = model.last_report
        assert report.demand_loads == report.deviations == 0
        assert report.observed["loads"] == report.predicted["loads"]
        assert report.observed["network"] == report.predicted["network"]
        odd = report.not_compared
        model.close()
    return found, odd


@pytest.mark.slow
@pytest.mark.parametrize("order", ["policy first", "reference first"])
@pytest.mark.parametrize("memory", ["cpu", "cuda"])
def test_two_ranks_train_next_to_a_reference_as_ddp_does(order: str, memory: str) -> None:
    plain = run_ranks(2, losses, order, None)
    ours = run_ranks(2, losses, order, memory)
    for (expected, _), (found, odd) in zip(plain, ours, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
        assert odd == ""
