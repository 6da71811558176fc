"""A step over whole stretches of a shard leaves alone what lies between parameters of the optimizer that steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common.parity import case, make_plan

BETWEEN = "model.decoder.layers.0.self_attn.k_proj.weight"
"""A position in the middle of its chunk."""
STEPS = 3


def adam(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("whose", ["frozen", "nobody's", "another's, that does not step"])
def test_a_parameter_in_between_keeps_its_value(whose: str, dtype: torch.dtype | None) -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, "streamed", unified_dtype=dtype)
    (chunk,) = (chunk for chunk in plan.chunks if BETWEEN in [slot.name for slot in chunk.parameters])
    assert BETWEEN not in (chunk.parameters[0].name, chunk.parameters[-1].name)
    module = ElixirModule(it.model, plan, device="cpu", debug=Debug(poison=True), use_fused_kernels=True)
    parameters = dict(module.module.named_parameters())
    between = parameters.pop(BETWEEN)
    between.requires_grad_(whose != "frozen")
    optimizer = ElixirOptimizer(module, adam(parameters.values()))
    if whose.startswith("another's"):
        ElixirOptimizer(module, adam([between]))
    before = copy.deepcopy(module.state_dict())
    for _ in range(STEPS):
        optimizer.backward(it.loss(module, it.inp))
        optimizer.step()
        module.zero_grad()
    after = module.state_dict()
    assert torch.equal(before[BETWEEN], after[BETWEEN])
    assert not any(
        torch.equal(before[slot.name], after[slot.name]) for slot in chunk.parameters if slot.name != BETWEEN
    )
    module.close()


def test_two_optimizers_over_one_chunk_step_as_two_of_torch() -> None:
    it = case("opt", layers=1)
    plain = copy.deepcopy(it.model)
    module = ElixirModule(
        it.model, make_plan(it, "streamed"), device="cpu", debug=Debug(poison=True), use_fused_kernels=True
    )
    made = []
    for model in (plain, module.module):
        parameters = dict(model.named_parameters())
        between = parameters.pop(BETWEEN)
        made.append([adam(parameters.values()), torch.optim.AdamW([between], lr=1e-3)])
    ours, theirs = [ElixirOptimizer(module, one) for one in made[1]], made[0]
    for _ in range(STEPS):
        it.loss(plain, it.inp).backward()
        ours[0].backward(it.loss(module, it.inp))
        for optimizer in (*ours, *theirs):
            optimizer.step()
        module.zero_grad()
        plain.zero_grad()
    expected = plain.get_parameter(BETWEEN)
    torch.testing.assert_close(module.state_dict()[BETWEEN], expected.detach(), rtol=1e-4, atol=1e-6)
    module.close()
