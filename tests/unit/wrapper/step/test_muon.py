"""Muon over matrices next to AdamW over everything else: the numbers of plain PyTorch, in every home."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.parity import MODES, Case, assert_alike, case, make_plan
from tests.common.tiny_models import FAMILIES

CASES = (*FAMILIES, "encoder")
QUICK = ("llama", "gpt2")


def optimizers(model: nn.Module, names: Any, **options: Any) -> list[torch.optim.Optimizer]:
    """Muon over the parameters with these names, AdamW over the others."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if name in set(names)]
    others = [each for name, each in named.items() if name not in set(names)]
    muon = torch.optim.Muon(matrices, lr=1e-2, **options)
    return [muon, torch.optim.AdamW(others, lr=1e-3)] if others else [muon]


def trained(
    case: Case, plan: Plan, *, steps: int = 3, accumulate: int = 1, clip: float = 0.0, **options: Any
) -> tuple[nn.Module, nn.Module, ElixirModule]:
    """The model in plain PyTorch and under the plan, after the same steps."""
    plain, streamed = gpu.there(copy.deepcopy(case.model)), copy.deepcopy(case.model)
    theirs = optimizers(plain, plan.matrices, **options)
    module = ElixirModule(streamed, plan)
    mine = [ElixirOptimizer(module, each) for each in optimizers(streamed, plan.matrices, **options)]
    for _ in range(steps):
        for _ in range(accumulate):
            case.loss(plain, gpu.there(case.inp)).backward()
            mine[0].backward(case.loss(module, case.inp))
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            module.clip_grad_norm_(clip)
        for each in (*theirs, *mine):
            each.step()
            each.zero_grad()
    return plain, streamed, module


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_weights_have_the_bits_of_torch(name: str, mode: str) -> None:
    given = case(name)
    plan = make_plan(given, mode, optimizer_type="Muon")
    assert plan.matrices
    assert plan.optimizer == "Muon + AdamW"
    plain, _, module = trained(given, plan)
    assert_alike(module, plain)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 4},
        {"momentum": 0.5, "eps": 1e-5, "ns_coefficients": (2.0, -1.5, 0.5)},
    ],
)
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_options_are_those_of_the_class(mode: str, options: dict[str, Any]) -> None:
    given = case("llama")
    plain, _, module = trained(given, make_plan(given, mode, optimizer_type="Muon"), **options)
    assert_alike(module, plain)


@pytest.mark.parametrize("mode", MODES)
def test_accumulated_and_clipped_gradients_give_the_bits_of_torch(mode: str) -> None:
    given = case("llama")
    plan = make_plan(given, mode, optimizer_type="Muon")
    plain, _, module = trained(given, plan, accumulate=2, clip=0.5)
    assert_alike(module, plain)


def test_backwards_are_counted_anew_when_all_optimizers_have_cleared_gradients() -> None:
    """Replicas sum gradients in the last backward of a step, and norms are of its sums."""
    given = case("llama")
    plan = make_plan(given, "streamed", optimizer_type="Muon")
    module = ElixirModule(given.model, plan)
    first, second = (ElixirOptimizer(module, each) for each in optimizers(given.model, plan.matrices))
    gradients = inside.gradients(module)
    for _ in range(2):
        first.backward(given.loss(module, given.inp))
    first.zero_grad()
    assert gradients.backward_count == 2
    second.zero_grad()
    assert gradients.backward_count == 0


def test_other_plans_ranks_homes_and_classes_are_refused() -> None:
    given = case("llama")
    with pytest.raises(InputError, match="norm.weight cannot be stepped by Muon"):
        make_plan(given, "streamed", optimizer_type="Muon", matrices=("model.norm.weight",))
    with pytest.raises(InputError, match="matrices need"):
        make_plan(given, "streamed", optimizer_type="AdamW", matrices=("lm_head.weight",))
    plan = make_plan(given, "streamed", optimizer_type="AdamW")
    module = ElixirModule(given.model, plan)
    matrices = [p for n, p in given.model.named_parameters() if n.endswith("q_proj.weight")]
    with pytest.raises(InputError, match="plan is for AdamW"):
        ElixirOptimizer(module, torch.optim.Muon(matrices))
    with pytest.raises(InputError, match="MyMuon is not elementwise"):
        ElixirOptimizer(module, type("MyMuon", (torch.optim.Muon,), {})(matrices))
    module.close()
    whole = make_plan(given, "streamed", optimizer_type="Muon")
    module = ElixirModule(given.model, whole)
    with pytest.raises(InputError, match=r"plan is for Muon \+ AdamW"):
        ElixirOptimizer(module, torch.optim.AdamW(given.model.parameters()))
