"""Early updates and the order of updates on several ranks: the bits are those without."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.lanes import Emulation
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.ddp import batch_of, plan_for
from tests.common.debug import debugged
from tests.common.early import HOMES, all_early, attempts
from tests.common.parity import hf_loss, rehomed, square_loss, take_step
from tests.common.spawn import on_each_rank, run_ranks
from tests.common.tiny_models import tiny

NORMS = (1e9, 1e9, 1e-3, 1e9, 1e9)


def _kept(rank: int, world_size: int, homes: str, options: dict[str, Any]) -> None:
    if "emulation" in options:
        options = {"emulation": Emulation(delay_s=1e-3, seed=rank)}
    model = tiny("gpt2")
    inp = batch_of(model, rank, world_size)
    ordinary = rehomed(plan_for(model, inp, "host", loss=hf_loss), homes)
    results = []
    for plan in (all_early(ordinary), ordinary):
        results.append(_trained(copy.deepcopy(model), plan, inp, options))
    (mine, kept), (plain, none) = results
    assert not any(none)
    assert [bool(count) for count in kept] == [norm > 1 for norm in NORMS]
    assert not [name for name in plain if not torch.equal(mine[name], plain[name])]


def _trained(model: Any, plan: Plan, inp: Any, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
    module = ElixirModule(model, plan, device="cpu", **debugged(options, poison=True))
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    kept = []
    for norm in NORMS:
        optimizer.max_norm = norm
        optimizer.backward(hf_loss(module, inp))
        assert bool(attempts(module)) == plan.has_early_updates
        optimizer.step()
        kept.append(module.last_report.early.kept)
        optimizer.zero_grad()
    state = module.state_dict()
    module.close()
    return state, kept


@pytest.mark.parametrize("homes", HOMES)
def test_same_bits_as_without(homes: str) -> None:
    run_ranks(2, _kept, homes, {})


@on_each_rank(2)
def test_ranks_may_differ_in_what_they_keep(rank: int, world_size: int) -> None:
    """One rank alone has wrong new states: all give the same weights all the same."""
    model = tiny("gpt2")
    inp = batch_of(model, rank, world_size)
    plan = all_early(rehomed(plan_for(model, inp, "host", loss=hf_loss), "states"))
    module = ElixirModule(model, plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    other = ElixirModule(
        tiny("gpt2"), replace(plan, chunks=tuple(replace(c, update="after_norm") for c in plan.chunks))
    )
    its = ElixirOptimizer(other, torch.optim.AdamW(other.parameters(), lr=1e-3))
    for _ in range(3):
        for each, steps in ((module, optimizer), (other, its)):
            steps.backward(hf_loss(each, inp))
            if rank == 0:
                for chunk in inside.chunks(each):
                    chunk.writes += 1  # as if somebody had written to its states
            steps.step()
            steps.zero_grad()
    mine, plain = module.state_dict(), other.state_dict()
    assert not [name for name in plain if not torch.equal(mine[name], plain[name])]
    module.close()
    other.close()


# --- the order of updates -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("max_norm", [None, 1e-2])
@on_each_rank(2)
def test_a_rank_that_steps_nothing_of_a_chunk_keeps_the_order(
    rank: int, world_size: int, max_norm: float | None
) -> None:
    model, plain = Small(), Small()
    torch.manual_seed(1)
    inputs = {"x": torch.randn(4, 8)}
    plan = plan_for(model, inputs, "device", loss=square_loss, split_number=3)
    module = ElixirModule(model, rehomed(plan, "resident"), device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), max_norm=max_norm)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for _ in range(4):
        take_step(optimizer, square_loss(module, inputs))
        square_loss(plain, inputs).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        theirs.step()
        theirs.zero_grad()
    found = module.state_dict()
    module.close()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value)
