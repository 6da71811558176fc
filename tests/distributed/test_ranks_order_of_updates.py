"""Ranks gather new weights in one order, whatever part of a chunk each of them steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.ddp import plan_for
from tests.common.parity import square_loss
from tests.common.spawn import run_ranks


class Small(nn.Module):
    """Has a weight between two layers so small that the second rank's shard of its chunk is only padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(4))
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x).tanh()
        out: torch.Tensor = self.last(hidden * self.scale.repeat(2))
        return out


def _steps(rank: int, world_size: int, max_norm: float | None) -> None:
    model, plain = Small(), Small()
    torch.manual_seed(1)
    inputs = {"x": torch.randn(4, 8)}
    plan = plan_for(model, inputs, "device", loss=square_loss, split_number=3)
    chunks = [replace(chunk, resident=True, weight_home="device", state_home="device") for chunk in plan.chunks]
    module = ElixirModule(model, replace(plan, chunks=tuple(chunks)), device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), max_norm=max_norm)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for _ in range(4):
        optimizer.backward(square_loss(module, inputs))
        optimizer.step()
        optimizer.zero_grad()
        square_loss(plain, inputs).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        theirs.step()
        theirs.zero_grad()
    found = module.state_dict()
    module.close()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("max_norm", [None, 1e-2])
def test_a_rank_that_steps_nothing_of_a_chunk_keeps_the_order(max_norm: float | None) -> None:
    run_ranks(2, _steps, max_norm)
