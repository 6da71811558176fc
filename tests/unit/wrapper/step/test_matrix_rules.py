"""A user's own class over matrices names its rule, and gets the bits that it has in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from elixir.api import dry_run
from elixir.errors import InputError, InputTypeError
from elixir.kernels.muon import MuonRule
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.step.user_optimizer import check_optimizer
from tests.common import gpu
from tests.common.parity import assert_alike, case, make_plan

COEFFICIENTS = ((8.2, -22.5, 15.9), (4.0, -2.8, 0.5), (2.3, -1.8, 0.6))
"""Others in every iteration, as in schedules that converge faster."""


def spread(direction: torch.Tensor) -> torch.Tensor:
    """Makes a direction orthogonal with plain operators, in a form that many projects copy."""
    tall = direction.shape[0] > direction.shape[1]
    found = direction.bfloat16().mT if tall else direction.bfloat16()
    found = found / (found.norm() + 1e-7)
    for a, b, c in COEFFICIENTS:
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    found = found.mT if tall else found
    return found * max(1, direction.shape[0] / direction.shape[1]) ** 0.5


class OwnRule(MuonRule):
    """The rule of `Own`."""

    @staticmethod
    def direction(
        gradient: torch.Tensor, momentum: torch.Tensor, factor: Any, options: Mapping[str, Any], out: torch.Tensor
    ) -> None:
        momentum.mul_(options["momentum"]).add_(gradient.to(momentum.dtype) * factor)
        out.copy_(momentum)

    @staticmethod
    def orthogonal(matrix: torch.Tensor, room: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        room[: matrix.numel()].view(matrix.shape).copy_(spread(matrix))
        return matrix

    @staticmethod
    def change(weights: torch.Tensor, direction: torch.Tensor, shape: torch.Size, options: Mapping[str, Any]) -> None:
        weights.add_(direction, alpha=-options["lr"])


class Own(torch.optim.Optimizer):
    """Momentum as in SGD, no decay, other iterations."""

    elixir_rule = OwnRule

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(weights))
                momentum.mul_(group["momentum"]).add_(weights.grad)
                weights.add_(spread(momentum), alpha=-group["lr"])


class Renamed(torch.optim.Muon):
    """The numbers of its base."""

    elixir_rule = MuonRule


def optimizers(model: nn.Module, names: Any, kind: type) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    return [
        kind([each for name, each in named.items() if name in names], lr=1e-2),
        torch.optim.AdamW([each for name, each in named.items() if name not in names]),
    ]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", [Own, Renamed])
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_weights_have_the_bits_of_the_class(mode: str, kind: type) -> None:
    given = case("llama")
    plain = gpu.there(copy.deepcopy(given.model))
    plan = make_plan(given, mode, optimizer_type="Muon")
    module = ElixirModule(given.model, plan, device=gpu.DEVICE)
    mine = [ElixirOptimizer(module, each) for each in optimizers(given.model, plan.matrices, kind)]
    theirs = optimizers(plain, plan.matrices, kind)
    for _ in range(3):
        given.loss(plain, gpu.there(given.inp)).backward()
        mine[0].backward(given.loss(module, given.inp))
        for each in (*theirs, *mine):
            each.step()
            each.zero_grad()
    assert_alike(module, plain)
    theirs[0].load_state_dict(mine[0].state_dict())  # by the names that the class has


class Decayed(Own):
    elixir_rule = OwnRule

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for weights in group["params"]:
                weights.data.mul_(0.99)


class Counting(Own):
    elixir_rule = OwnRule

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["step"] = torch.tensor(1.0)


class Filling(Own):
    """Takes zeros for gradients that are missing, so that momenta go on without them."""

    elixir_rule = OwnRule

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                weights.grad = torch.zeros_like(weights) if weights.grad is None else weights.grad
        super().step()


@pytest.mark.parametrize("kind", [Decayed, Counting, Filling])
def test_a_class_that_does_more_than_its_rule_is_refused(kind: Any) -> None:
    with pytest.raises(InputError, match=f"{kind.__name__} steps with other numbers, or other states"):
        check_optimizer(kind([nn.Parameter(torch.ones(4, 4))], lr=0.0), "float32")


def test_a_rule_is_not_inherited_and_must_be_one() -> None:
    given = case("llama")
    names = [name for name, each in given.model.named_parameters() if name.endswith("q_proj.weight")]
    heir: Any = type("Heir", (Own,), {})
    with pytest.raises(InputError, match=r"Heir is not elementwise: .*a class with an elixir_rule"):
        dry_run(given.model, optimizers(given.model, names, heir), inp=given.inp, hardware="cpu")
    wrong: Any = type("Wrong", (Own,), {"elixir_rule": "muon"})
    with pytest.raises(InputTypeError, match="must be MuonRule or a subclass"):
        dry_run(given.model, optimizers(given.model, names, wrong), inp=given.inp, hardware="cpu")
