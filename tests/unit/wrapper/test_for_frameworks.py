"""Parts of the wrapper on which frameworks lean: `to()` where nothing changes, plans given, parts of state dicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.errors import InputError
from elixir.wrapper import ElixirModule, ElixirOptimizer

ON_HOST = {"hardware": "cpu", "placement": "cpu", "device_memory": "1MiB", "host_budget": "64MiB", "assume": "nominal"}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    return model


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    model(inp["x"]).square().mean().backward()


def wrapped(**options: Any) -> tuple[ElixirModule, ElixirOptimizer]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return elixir.wrap(model, optimizer, inp=batch(), step_fn=step, **{**ON_HOST, **options})


def test_several_optimizers_share_a_plan() -> None:
    model, plain = make_model(), make_model()
    parts = [[torch.optim.AdamW(each[index].parameters(), lr=1e-2) for index in (0, 1, 2)] for each in (model, plain)]
    wrapper, optimizers = elixir.wrap(model, parts[0], inp=batch(), step_fn=step, **ON_HOST)
    for run, each in ((wrapper, optimizers), (plain, parts[1])):
        for _ in range(3):
            step(run, batch())
            for optimizer in each:
                optimizer.step()
            for optimizer in each:
                optimizer.zero_grad()
    state = wrapper.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    wrapper.close()
    mixed = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters())]
    with pytest.raises(InputError, match="one family"):
        elixir.wrap(model, mixed, inp=batch(), step_fn=step, **ON_HOST)


def test_wrapping_a_wrapped_model_says_so_before_anything_is_traced() -> None:
    wrapper, _ = wrapped()
    with pytest.raises(InputError, match="run by an ElixirModule already"):
        elixir.wrap(wrapper.module, torch.optim.AdamW(wrapper.module.parameters()), inp=batch(), step_fn=step)
    wrapper.close()
