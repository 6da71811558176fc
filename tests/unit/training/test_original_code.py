"""Code for the first Elixir runs as printed: its imports, its keywords, ``init_step`` and ``verbose``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elixir import ElixirModule, ElixirOptimizer, HybridAdam, optimal_search
from tests.common import gpu, inside
from tests.common.parity import case, make_plan, take_step

ADAMS = {
    "Adam": torch.optim.Adam,
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "HybridAdam": HybridAdam,
}


def trained(make: Any, mode: str, *, init_step: bool, dtype: torch.dtype | None) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of three steps; what is there before the first is checked."""
    it = case("opt", layers=1)
    options = {} if dtype is None else {"unified_dtype": dtype}
    plan = make_plan(it, mode, **options)
    model = ElixirModule(copy.deepcopy(it.model), plan, device=gpu.DEVICE)
    before = copy.deepcopy(model.state_dict())
    optimizer = ElixirOptimizer(model, make(model.parameters()), init_step=init_step)
    parts = list(inside.shards(optimizer))
    if init_step:
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        for part in parts:
            assert set(part.states.tensors) >= {"exp_avg", "exp_avg_sq"}
            assert not any(tensor.any() for tensor in part.states.tensors.values())
            assert {tensor.device for tensor in part.states.tensors.values()} == {part.states.master.device}
            assert not any(map(part.states.has_stepped, part.segments))
    losses = []
    for _ in range(3):
        loss = it.loss(model, it.inp)
        take_step(optimizer, loss)
        losses.append(loss.item())
    after = copy.deepcopy(model.state_dict())
    model.close()
    return losses, after


@pytest.mark.parametrize("mode", ["resident", "streamed"])
@pytest.mark.parametrize(
    "name", [name if name == "Adam" else pytest.param(name, marks=pytest.mark.slow) for name in ADAMS]
)
def test_states_that_are_there_before_the_first_step_change_no_bit(name: str, mode: str) -> None:
    dtype = torch.bfloat16 if name == "HybridAdam" else None
    (mine, weights), (plain, expected) = (
        trained(ADAMS[name], mode, init_step=init_step, dtype=dtype) for init_step in (True, False)
    )
    assert mine == plain
    assert all(torch.equal(weights[key], value) for key, value in expected.items())


def test_the_printed_code_runs() -> None:
    """Names and order of the original's README, with a small model instead of its BERT."""
    it = case("bert")
    model: nn.Module = it.model
    sr = optimal_search(
        model, 1, unified_dtype=torch.float32, overlap=True, verbose=False, inp=it.inp,
        step_fn=lambda model, inp: it.loss(model, inp).backward(), hardware="cpu",
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)
    model = ElixirModule(model, sr, None, prefetch=True, dtype=torch.float32)
    optimizer = ElixirOptimizer(model, optimizer, initial_scale=64, max_norm=1.0, init_step=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = it.loss(model, it.inp)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
