"""Models, compared with the same models with fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elixir.models.step import default_input
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import Case, adamw
from tests.common.tiny_models import tiny


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close_gradients(mine: nn.Module, plain: nn.Module, limit: float) -> None:
    """Each gradient is within `limit` of its norm, or of a thousandth of the largest of all."""
    found, expected = gradients(mine), gradients(plain)
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(grad.float().norm() for grad in expected.values())
    for name, grad in expected.items():
        error = (found[name].float() - grad.float()).norm()
        assert error <= limit * max(grad.float().norm(), floor), name


def language_case(family: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = tiny(family, **options)
    inp = default_input(model, batch=2, seq=None if family == "vit" else 24)
    if "labels" in inp and inp["labels"].dim() == 2:
        inp["labels"][:, :5] = -100
    return model, inp


def train_with_plain(it: Case, module: ElixirModule, plain: nn.Module, limit: float, steps: int = 3) -> None:
    """Losses of each step and those of plain PyTorch; the model has its own code back at the end."""
    optimizer, theirs = ElixirOptimizer(module, adamw(module.module)), adamw(plain)
    for _ in range(steps):
        mine, loss = it.loss(module, it.inp), it.loss(plain, it.inp)
        torch.testing.assert_close(mine, loss, rtol=limit, atol=0)
        optimizer.backward(mine)
        loss.backward()
        for stepping in (optimizer, theirs):
            stepping.step()
            stepping.zero_grad()
    inner = module.module
    module.close()
    assert not any("forward" in vars(part) for part in inner.modules())
