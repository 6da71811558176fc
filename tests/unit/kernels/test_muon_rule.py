"""`MuonRule`, the three parts of a step of `torch.optim.Muon`, over pieces and in the memory that a plan counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from elixir.kernels.muon import MuonRule
from elixir.optimizer_states import matrix_room_bytes


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.3},
        {"nesterov": False, "momentum": 0.5, "adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 4, "lr": torch.tensor(0.01)},
        {"eps": 1e3, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 1},
    ],
)
def test_a_step_has_the_bits_of_torch(
    shape: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elixir.kernels.muon.LARGEST_HOST_PIECE_NUMEL", 100)
    generator, numel = torch.Generator().manual_seed(0), shape[0] * shape[1]
    weights = nn.Parameter(torch.randn(shape, generator=generator))
    mine, momentum = weights.detach().clone().view(-1), torch.zeros(numel)
    optimizer = torch.optim.Muon([weights], **{"lr": 1e-2, **options})
    group = optimizer.param_groups[0]
    for factor in (1.0, 0.25, torch.tensor(0.25)):
        weights.grad = torch.randn(shape, generator=generator)
        gradient = (weights.grad / factor).view(-1)
        before, room = gradient.clone(), torch.full((matrix_room_bytes(*shape) // 2,), math.nan, dtype=torch.bfloat16)
        MuonRule.direction(gradient, momentum, factor, group, room[:numel])
        found = MuonRule.orthogonal(room[:numel].view(shape), room, group)
        MuonRule.change(mine, found.reshape(-1), weights.shape, group)
        optimizer.step()
        assert torch.equal(mine, weights.detach().view(-1))
        assert torch.equal(momentum, optimizer.state[weights]["momentum_buffer"].view(-1))
        assert torch.equal(gradient, before)
        assert found.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()
