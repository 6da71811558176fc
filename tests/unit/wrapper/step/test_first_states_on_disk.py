"""States that an optimizer's class makes itself, for chunks whose states live on a disk: the bits, and the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.chunk.host_buffers import WINDOW
from elixir.kernels import HybridAdam
from elixir.wrapper.step.shard import SteppedShard
from tests.common import inside
from tests.common.on_disk import in_memory, on_disk
from tests.common.parity import Pair, case, make_plan
from tests.unit.wrapper.step.test_states_on_disk import assert_same


class Stepping(torch.optim.SGD):
    """Counts its steps in its groups, in no state, and steps one weight after the other, as a subclass says."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        for options in (self.defaults, *self.param_groups):
            options["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for weights in group["params"]:
                if weights.grad is not None:
                    self.update(weights, self.state[weights], weights.grad, group["lr"], group["steps"])

    def update(
        self, weights: torch.Tensor, state: dict[str, Any], gradient: torch.Tensor, lr: float, steps: int
    ) -> None:
        raise NotImplementedError


class Counting(Stepping):
    """Makes its states in the third step."""

    def update(
        self, weights: torch.Tensor, state: dict[str, Any], gradient: torch.Tensor, lr: float, steps: int
    ) -> None:
        if steps >= 3:
            state.setdefault("begun", steps)
            state.setdefault("sum", torch.zeros_like(weights)).add_(gradient)
            weights.add_(state["sum"], alpha=-lr / state["begun"])
        else:
            weights.add_(gradient, alpha=-lr / steps)


class Listing(Stepping):
    """Keeps a list of tensors for each weight, and a state that is no flat tensor."""

    def update(
        self, weights: torch.Tensor, state: dict[str, Any], gradient: torch.Tensor, lr: float, steps: int
    ) -> None:
        sums = state.setdefault("sums", [torch.zeros_like(weights)])
        pair = state.setdefault("pair", torch.zeros(2, *weights.shape))
        sums[0].add_(gradient)
        pair[1].add_(sums[0])
        weights.sub_((sums[0] + pair[1]) * (lr / steps))


class AtOnce(Stepping):
    """Makes two states of a weight in its constructor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for weights in group["params"]:
                self.state[weights] = {
                    "step": torch.zeros(()),
                    "first": torch.full_like(weights, 0.01),
                    "sum": torch.ones_like(weights),
                }

    def update(
        self, weights: torch.Tensor, state: dict[str, Any], gradient: torch.Tensor, lr: float, steps: int
    ) -> None:
        state["step"] += 1
        state["sum"].mul_(0.9).addcmul_(gradient, gradient)
        weights.addcdiv_(gradient, state["sum"].sqrt(), value=-lr)
        weights.lerp_(state["first"], 1e-3)


class Late(Stepping):
    """Makes two states of a weight in its second step."""

    def update(
        self, weights: torch.Tensor, state: dict[str, Any], gradient: torch.Tensor, lr: float, steps: int
    ) -> None:
        if steps >= 2:
            sums = [state.setdefault(name, torch.zeros_like(weights)) for name in ("sum", "sum_of_sums")]
            sums[0].add_(gradient)
            sums[1].add_(sums[0])
            weights.add_(sums[1], alpha=-lr)


def centered(parameters: Any) -> torch.optim.Optimizer:
    """A class of torch that makes three states in its first step."""
    return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True)


QUICK: dict[str, Any] = {
    "counting": Counting,
    "listing": Listing,
    "at once": AtOnce,
    "late": Late,
    "centered": centered,
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1),
}
MORE: dict[str, Any] = {
    "HybridAdam": lambda parameters: HybridAdam(parameters, lr=1e-3),
    "Adadelta": torch.optim.Adadelta,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_states_that_a_class_makes_have_the_bits_of_plain_pytorch(name: str, tmp_path: Path) -> None:
    """The bits hold while states move between disk and memory, before they are made and after."""
    make = {**QUICK, **MORE}[name]
    it = case("gpt2", layers=1)
    plan = make_plan(it, "streamed")
    options = {"disk_folder": tmp_path, "use_fused_kernels": False}
    with Pair(it, on_disk(plan), optimizer=lambda model: make(model.parameters()), max_norm=0.5, **options) as pair:
        for there in (on_disk(plan), in_memory(plan), on_disk(plan, 2)):
            pair.module.rehome(there)
            pair.train(2)
            pair.assert_same_weights()


def test_states_that_are_loaded_go_to_the_window_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("gpt2", layers=1)
    plan = on_disk(make_plan(it, "streamed"))
    with Pair(it, plan, optimizer=lambda model: centered(model.parameters()), disk_folder=tmp_path) as first:
        first.train(1)
        saved, count = first.optimizer.state_dict(), len(plan.chunks)
    seen: list[bool] = []

    def look(part: SteppedShard, find: Any, wait: Any) -> Any:
        notes = load(part, find, wait)
        window = {b.tensor.untyped_storage().data_ptr() for b in inside.host_buffers(pair.module, WINDOW)}
        loaded = list(part.states.tensors.values())
        seen.append(bool(loaded) and all(v.untyped_storage().data_ptr() in window for v in loaded))
        return notes

    load = SteppedShard.load
    monkeypatch.setattr(SteppedShard, "load", look)
    with Pair(
        case("gpt2", layers=1), plan, optimizer=lambda model: centered(model.parameters()), disk_folder=tmp_path
    ) as pair:
        pair.optimizer.load_state_dict(saved)
        assert seen == [True] * count
        assert_same(({}, pair.optimizer.state_dict()), ({}, saved))
