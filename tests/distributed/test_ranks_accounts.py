"""Several ranks take the memory that their plan allots, whatever gets no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elixir.search import optimal_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.spawn import run_ranks


class PartlyUsed(nn.Module):
    """Layers, the first to get a gradient being followed by one that the step never uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.norm = nn.LayerNorm(64)
        self.unused = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x).square().sum()


def steps(rank: int, world_size: int, overlap: bool) -> tuple[int, int, int]:
    model, inp = PartlyUsed(), {"x": torch.ones(2, 64)}
    plan = optimal_search(
        model, world_size, inp=inp, step_fn=lambda m, i: m(**i).backward(), hardware="cpu", overlap=overlap,
        device_memory="1GiB", host_budget="1GiB", placement="cuda",
    ).plan  # fmt: skip
    assert all(chunk.resident for chunk in plan.chunks)
    module = ElixirModule(model, plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    for _ in range(2):
        module(**inp).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = module.last_report
    assert report is not None
    found = inside.gradients(module).extra_blocks, report.observed["device_buffers"], report.predicted["device_peak"]
    module.close()
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_reductions_do_not_wait_for_a_gradient_that_never_comes(overlap: bool) -> None:
    for extra_blocks, peak_bytes, limit_bytes in run_ranks(2, steps, overlap):
        assert extra_blocks == 0
        assert peak_bytes <= limit_bytes
