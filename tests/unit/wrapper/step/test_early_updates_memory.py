"""Memory of new states that are made while backward runs: what is counted and predicted, and who still reads the old."""

from __future__ import annotations

import torch

from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.early import chain
from tests.common.parity import take_step
from tests.unit.wrapper.step.test_early_updates import chain_plan


def test_the_second_set_of_states_is_counted() -> None:
    it = chain()
    plan = chain_plan(it, "states", unified_dtype="bfloat16")
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, use_fused_kernels={"cross_entropy": "plain"})
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.module.parameters(), lr=1e-3))
    arena = inside.arena(module)
    parts = arena.parts("host")
    numel = sum(chunk.numel for chunk in plan.chunks)
    assert parts["new_states"] == numel * (4 + 8 + 2)
    for _ in range(3):
        take_step(optimizer, it.loss(module, it.inp))
    assert arena.parts("host")["new_states"] == parts["new_states"]
