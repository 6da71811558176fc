"""States of any form move between homes as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.common import inside
from tests.common.parity import Case, Pair, case, make_plan, rehomed


class Kept(torch.optim.Optimizer):
    """A rule that looks at a state which `make` makes in the first step."""

    def __init__(self, parameters: Any, make: Callable[[torch.Tensor], Any], lr: float = 1e-2) -> None:
        self._make = make
        super().__init__(parameters, {"lr": lr, "make": make})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"], state["kept"] = torch.zeros_like(weight), group["make"](weight)
                scale = state["kept"][0] if isinstance(state["kept"], tuple) else state["kept"]
                state["mean"].mul_(0.9).add_(weight.grad)
                weight.addcmul_(state["mean"], torch.ones_like(weight) * scale, value=-group["lr"])


def a_pair(weight: torch.Tensor) -> Any:
    return (0.5, 2.0)


class Later(Kept):
    """Makes another state in its second step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, a_count)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        again = [weight for group in self.param_groups for weight in group["params"] if self.state[weight]]
        super().step()
        for weight in again:
            self.state[weight].setdefault("later", torch.ones_like(weight))


def in_one_place(weight: torch.Tensor) -> Any:
    return torch.full((), 0.5, device=weight.device).expand(weight.shape)


def in_16_bits(weight: torch.Tensor) -> Any:
    return torch.full_like(weight, 0.5, dtype=torch.bfloat16)


def a_count(weight: torch.Tensor) -> Any:
    return torch.ones((), dtype=torch.int64)


MAKE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "made ahead": (lambda parameters: torch.optim.Adagrad(parameters, initial_accumulator_value=0.5), 0),
    "a pair": (lambda parameters: Kept(parameters, a_pair), 2),
    "in one place": (lambda parameters: Kept(parameters, in_one_place), 2),
    "in 16 bits": (lambda parameters: Kept(parameters, in_16_bits), 2),
    "a count": (lambda parameters: Kept(parameters, a_count), 2),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("start", "to"), [("streamed", "resident"), ("resident", "mixed")])
def test_states_move_as_they_are(name: str, start: str, to: str) -> None:
    make, steps = MAKE[name]
    it = case("opt")
    plan = make_plan(it, "streamed")
    with Pair(it, rehomed(plan, start), optimizer=lambda model: make(model.parameters())) as pair:
        pair.train(steps)
        pair.module.rehome(rehomed(plan, to))
        pair.train(2)


def test_shards_that_share_a_call_let_go_of_states_one_by_one() -> None:
    it: Case = case("opt")
    plan = rehomed(make_plan(it, "streamed"), "resident")
    with Pair(it, plan, optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True)) as pair:
        pair.train(1)
        states = [shard.states for shard in inside.shards(pair.optimizer)]
        states[0].forget()
        assert list(states[1].to_save())
        assert len(states[1].by_weights) == sum(len(other.segments) for other in states[1:])
        pair.module.close()


@pytest.mark.parametrize("homes", ["resident", "streamed"])
def test_states_that_a_class_makes_after_its_first_step_are_counted(homes: str) -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, "streamed")
    with Pair(it, rehomed(plan, homes), optimizer=lambda model: Later(model.parameters())) as pair:
        for _ in range(3):
            pair.train(1)  # ends with an audit of what is counted
        pair.module.rehome(rehomed(plan, "mixed"))
        pair.train(1)
