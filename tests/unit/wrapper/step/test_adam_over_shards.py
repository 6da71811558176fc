"""`use_fused_kernels=True`: Adam over whole shards in one pass, the same rule to rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from elixir.kernels import HybridAdam
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.step.rules import AdamRule
from tests.common import gpu, inside
from tests.common.parity import Case, case, make_plan, mixed

STEPS = 10
LR = 1e-3


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Norms and biases without decay and with another rate, so that stretches of one group are short."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0, "lr": LR / 2}]


OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=LR, weight_decay=0.1),
    "groups": lambda model: torch.optim.AdamW(groups(model), lr=LR, betas=(0.8, 0.95)),
    "HybridAdam": lambda model: HybridAdam(model.parameters(), lr=LR, weight_decay=0.1),
}


def wrapped(it: Case, mode: str, make: Any, **options: Any) -> tuple[ElixirModule, ElixirOptimizer]:
    plan = make_plan(it, mode, unified_dtype=options.pop("dtype", None))
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, debug=Debug(poison=True), use_fused_kernels=True)
    return module, ElixirOptimizer(module, make(module.module), **options)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", ["streamed", "mixed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_torch_to_rounding(name: str, mode: str) -> None:
    it = case("bert")  # has parameters without a gradient
    plain = copy.deepcopy(it.model)
    theirs = OPTIMIZERS[name](plain)
    module, optimizer = wrapped(it, mode, OPTIMIZERS[name], max_norm=1.0)
    assert (
        sum(isinstance(part.rule, AdamRule) for part in inside.shards(module)) >= len(list(inside.shards(module))) // 2
    )
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, STEPS) for o in (optimizer, theirs)]
    for step in range(STEPS):
        losses = [it.loss(model, it.inp) for model in (module, plain)]
        assert abs(losses[0] - losses[1]) < 1e-5 * losses[1]
        for loss in losses:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for stepping in (optimizer, theirs, *schedulers):
            stepping.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        if step == 4:
            module.rehome(mixed(module.plan))
    state = module.state_dict()
    for key, value in plain.state_dict().items():
        if value.is_floating_point() and not key.endswith("key.bias"):  # their gradient is rounding noise
            assert (state[key] - value).norm() <= 1e-5 * value.norm() + 1e-3 * LR * value.numel() ** 0.5, key
