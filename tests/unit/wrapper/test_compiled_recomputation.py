"""Compiled layers are kept or recomputed whole: bits, weights of the second run, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from elixir.plan.plan import Plan
from elixir.step_trace import UnitActivations
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.run_options import Debug
from tests.common.parity import MODES, Case
from tests.unit.wrapper.test_compiled_layers import compiled, fresh, plan_of, train


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    fresh()
    yield
    fresh()


class Layer(nn.Module):
    """Draws random numbers, of which backward must see the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.5, self.training))
        return x + made


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack() -> Case:
    torch.manual_seed(0)
    return Case(Stack(), {"x": torch.randn(8, 16)}, lambda model, inp: model(inp["x"]).square().mean())


def whole(*again: bool, layers: str = "layers") -> tuple[UnitActivations, ...]:
    """Activations by layer: `again` says which of them run again."""
    return tuple(UnitActivations(f"{layers}.{number}", () if each else None) for number, each in enumerate(again))


def with_activations(plan: Plan, own: Sequence[UnitActivations]) -> Plan:
    return replace(plan, step=replace(plan.step, activations=tuple(own)))


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_run_again_give_the_bits_of_those_that_do_not(mode: str) -> None:
    it = stack()
    plain = compiled(copy.deepcopy(it.model))
    torch.manual_seed(1)
    wanted = train(it, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    fresh()
    compiled(it.model)
    plan = with_activations(plan_of(it, mode), whole(True, False, True, True))
    assert Plan.from_json(plan.to_json()) == plan
    model = ElixirModule(it.model, plan, device="cpu", debug=Debug(poison=True))
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch.manual_seed(1)
    assert train(it, model, optimizer) == wanted
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    model.close()
    torch.manual_seed(1)
    again = it.loss(it.model, it.inp)
    assert torch.isfinite(again)
