"""Plans under which the host makes new states during backward, and what a run of one shows of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule
from tests.common import inside
from tests.common.parity import Case, make_plan, rehomed, square_loss

HOMES = ("streamed", "states", "mixed")
"""Everything on the host; weights on the device and states on the host; chunks of every kind in turn."""
needs_kernel = pytest.mark.skipif(
    shutil.which("g++") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the host's Adam has no kernel here: no C++ compiler, or torch uses no vectors of this processor",
)


class Chain(nn.Module):
    """Layers of one chunk each, used one after the other."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x).tanh()
        return x


def chain(layers: int = 4) -> Case:
    torch.manual_seed(0)
    return Case(Chain(layers), {"x": torch.randn(4, 8)}, square_loss)


def updating_early(case: Case, homes: str = "streamed", **options: Any) -> Plan:
    """A plan of one rank under which every chunk that the host steps is updated early, with other homes."""
    plan = rehomed(make_plan(case, "streamed", **options), homes)
    return all_early(plan)


def all_early(plan: Plan) -> Plan:
    """The plan with every chunk that the host steps updated early."""
    chunks = [
        replace(chunk, update="early") if chunk.state_home == "host" and chunk.grad_entry is not None else chunk
        for chunk in plan.chunks
    ]
    return replace(plan, chunks=tuple(chunks), may_update_early=True)


def attempts(module: ElixirModule) -> list[int]:
    """Chunks with new states that no `step` has looked at."""
    stepper = inside.stepper(module)
    return sorted(shard.chunk.index for shard in stepper.shards if shard._early is not None)
