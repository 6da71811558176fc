"""Layers that a plan fetches as one: bits of plain PyTorch, loads of the plan, and which layers may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.access.interception import TrackedParameter
from elixir.errors import InputError
from elixir.models.layer_units import fetched_as_one
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.run_options import Debug
from elixir.wrapper.weight_uses import WeightUses
from tests.common import inside
from tests.common.layered_steps import taken_piecewise
from tests.common.parity import COUNTED, Case, Pair, assert_as_planned, case, mixed, square_loss
from tests.common.tracing import cpu_trace
from tests.unit.wrapper.test_compiled_layers import CHECKPOINTS, train

FAMILIES = ("opt", "gpt2", "llama", "bert", "t5", "vit", "mixtral")
_EVERY = [
    (name, form, mode)
    for name in FAMILIES
    for form in CHECKPOINTS
    for mode in ("streamed", "mixed")
    if (name, form) != ("vit", "reentrant")
]
_FIRST = ("llama", "non-reentrant", "streamed")


def plan_of(it: Case, *, piecewise: bool = False, **options: Any) -> Plan:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    options = {"split_number": 12, "allocate_factor": 1.0, "shard_device": "cpu", "hardware": "cpu"} | options
    if piecewise:
        return simple_search(taken_piecewise(cpu_trace(it.model, it.inp, step)), 1, **options).plan
    return simple_search(it.model, 1, inp=it.inp, step_fn=step, **options).plan


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "form", "mode"), sorted(_EVERY, key=_FIRST.__ne__))
def test_same_bits_and_loads_as_planned(name: str, form: str, mode: str) -> None:
    it = case(name, form)
    plan = plan_of(it)
    joined = [unit.name for unit in plan.step.units if unit.fetch == "one"]
    assert bool(joined) == (name != "mixtral")  # its layers choose experts
    with Pair(it, mixed(plan) if mode == "mixed" else plan, device="cpu") as pair:
        pair.train(4)
        pair.assert_same_weights()
        assert_as_planned(pair.module, COUNTED if mode == "streamed" else ())


def uses_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A list that fills with the function, and the number of weights, of each use by models that are wrapped later."""
    seen, used = list[tuple[str, int]](), WeightUses.used

    def noted(uses: WeightUses, parameters: list[nn.Parameter], function: str) -> None:
        seen.append((function, len(parameters)))
        used(uses, parameters, function)

    monkeypatch.setattr(WeightUses, "used", noted)
    return seen


def test_a_unit_is_announced_once_and_pinned_through_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("llama")
    plan = plan_of(it)
    by_parameter = plan_of(it, piecewise=True)
    assert len(plan.order) < len(by_parameter.order)
    seen = uses_of(monkeypatch)
    model = ElixirModule(it.model, plan, device="cpu")
    loss = it.loss(model, it.inp)
    layers = [count for function, count in seen if function == "a layer"]
    assert layers == [len(list(layer.parameters())) for layer in fetched_as_one(it.model, plan.step)]
    assert not {"linear"} & {function for function, count in seen if count > 1}
    assert all(isinstance(parameter, TrackedParameter) for parameter in it.model.parameters())
    loss.backward()
    assert not any(chunk.pins for chunk in inside.chunks(model))


class Layer(nn.Module):
    """A product, and whatever a test makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Layers of one class."""

    def __init__(self, kind: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.begin, self.layers = nn.Linear(4, 4), nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Writes(Layer):
    """Clamps a weight, as Gemma-3n does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-1.0, 1.0)
        return super().forward(x)


class RunsAPartAgain(Layer):
    """Checkpoints a part of itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(checkpoint(self.up, x, use_reentrant=False))  # type: ignore[arg-type]
        return result


class Chooses(Layer):
    """Chooses rows of a weight by scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.up(x).topk(1, dim=-1).indices
        return x + self.down(x) * (chosen + 1)


INP = {"x": torch.ones(2, 4)}


@pytest.mark.parametrize("mode", ["streamed", "mixed"])
def test_a_write_that_the_trace_did_not_see_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Case(Stack(), INP, square_loss)
    plan = plan_of(it)
    model = ElixirModule(it.model, mixed(plan) if mode == "mixed" else plan, device="cpu", debug=Debug(poison=True))
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters()))
    train(it, model, optimizer, 1)
    forward = Layer.forward

    def writes(self: Layer, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return forward(self, x)

    monkeypatch.setattr(Layer, "forward", writes)
    with pytest.raises(InputError, match=r"the forward wrote to layers.\d.up.weight in place.* fetched as one and did"):
        train(it, model, optimizer, 1)
