"""Gradients that code asks for inside of a pass, whose graphs end at layers: as in a loop, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.torch_private import seeing_asked_gradients
from tests.common.one_pass import LossFn, Stack, in_passes, plainly, plan_for, vectors

WHOLE, CUT = ("last.weight", "hidden", "out"), ("x", "first.weight", "tied.weight", "layers.1.weight", "entered")


class Asked(Stack):
    """Returns what it has computed before, between and after its layers; a weight is read before and after them."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(8, 8) for _ in range(3)])
        self.tied = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        entered = hidden = self.first(self.tied(x))
        for layer in self.layers:
            hidden = torch.tanh(self.run(layer, hidden))
        out = self.tied(hidden)
        return {"entered": entered, "hidden": hidden, "out": out, "loss": self.last(out).square().mean()}


def make() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Asked().train()


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"])["loss"]
    return loss


def asking(of: str, how: str, found: list[torch.Tensor]) -> LossFn:
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        made = model(x)
        item = made.get(of) if of in made else x if of == "x" else model.get_parameter(of)
        if how == "materialize_grads":
            item = torch.autograd.graph.get_gradient_edge(item)
        if how == "inputs":
            torch.autograd.backward(made["loss"], inputs=[item], retain_graph=True)
        else:
            options = {"allow_unused": True} if how == "allow_unused" else {"materialize_grads": True}
            found.extend(torch.autograd.grad(made["loss"], item, retain_graph=True, **options))
        return made["loss"]  # type: ignore[no-any-return]

    return loss


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("how", "home"), [("allow_unused", "cpu"), ("materialize_grads", "cuda")])
@pytest.mark.parametrize("of", [*WHOLE, *CUT])
def test_gradients_are_whole_or_refused(of: str, how: str, home: str) -> None:
    steps, found = vectors(2, steps=1), list[torch.Tensor]()
    plan = plan_for(make(), steps[0][0], loss_of, accumulation=2, home=home)
    if of in CUT:
        with pytest.raises(InputError, match="gradient that goes through layers.*pass_size=1"):
            in_passes(make, steps, plan, asking(of, how, found))
        return
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    ours = in_passes(make, steps, plan, asking(of, how, found))
    assert torch.autograd._engine_run_backward is before  # type: ignore[attr-defined]
    plain = list[torch.Tensor]()
    assert ours.same_as(plainly(make, steps, asking(of, how, plain)))
    assert len(found) == len(plain) == 2
    assert all(map(torch.equal, found, plain))


class WithPart(nn.Module):
    """Returns a part of its output next to it, in either order."""

    def __init__(self, part_first: bool) -> None:
        super().__init__()
        self.linear, self._part_first = nn.Linear(8, 8), part_first

    def forward(self, x: torch.Tensor) -> Any:
        found = torch.tanh(self.linear(x))
        part = found.square().mean()
        return (part, found) if self._part_first else (found, part)


class Parts(Stack):
    """Adds the parts of its layers' outputs to the loss."""

    def __init__(self, part_first: bool) -> None:
        super().__init__([WithPart(part_first) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Any:
        hidden, parts = self.first(x), []
        for layer in self.layers:
            pair: Any = self.run(layer, hidden)
            hidden, part = sorted(pair, key=torch.Tensor.dim, reverse=True)
            parts.append(part)
        return {"hidden": hidden, "loss": self.last(hidden).square().mean() + 0.3 * torch.stack(parts).sum()}


@pytest.mark.parametrize("part_first", [True, False])
def test_outputs_that_are_made_of_each_other_have_whole_gradients(part_first: bool) -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Parts(part_first).train()

    steps = vectors(2, steps=2)
    plan = plan_for(make(), steps[0][0], loss_of, accumulation=2, home="cuda")
    assert in_passes(make, steps, plan, loss_of).same_as(plainly(make, steps, loss_of))
    with pytest.raises(InputError, match="gradient that goes through layers"):
        in_passes(make, steps, plan, asking("hidden", "allow_unused", []))


@pytest.mark.parametrize("of", ["output", "input"])
def test_the_gradient_of_what_leaves_or_enters_a_layer_is_refused(of: str) -> None:
    """No operator comes after an output; an input is a leaf in a pass."""

    def loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        with model.layers[2].register_forward_hook(lambda layer, args, output: outputs.append(output)):
            made = model(batch["x"])
        asked = outputs[0] if of == "output" else made["entered"]
        torch.autograd.grad(asked, model.first.weight, torch.ones_like(asked), allow_unused=True)
        found: torch.Tensor = made["loss"]
        return found

    steps = vectors(2, steps=1)
    plan = plan_for(make(), steps[0][0], loss_of, accumulation=2)
    with pytest.raises(InputError, match="gradient that goes through layers.*pass_size=1"):
        in_passes(make, steps, plan, loss)


@pytest.mark.parametrize("create_graph", [False, True])
def test_what_has_entered_a_layer_gives_the_gradients_of_what_else_is_made_of_it(create_graph: bool) -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        made = model(batch["x"])
        penalty = made["entered"].square().mean()
        (slope,) = torch.autograd.grad(penalty, made["entered"], retain_graph=True, create_graph=create_graph)
        found: torch.Tensor = made["loss"] + slope.square().sum() * penalty
        return found

    steps = vectors(2, steps=1)
    plan = plan_for(make(), steps[0][0], loss_of, accumulation=2)
    assert in_passes(make, steps, plan, loss).same_as(plainly(make, steps, loss))


def test_but_not_to_its_own_grad() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        made = model(batch["x"])
        torch.autograd.backward(made["entered"].sum(), inputs=[made["entered"]], retain_graph=True)
        found: torch.Tensor = made["loss"]
        return found

    steps = vectors(2, steps=1)
    plan = plan_for(make(), steps[0][0], loss_of, accumulation=2)
    with pytest.raises(InputError, match=r"backward\(inputs=\).*pass_size=1"):
        in_passes(make, steps, plan, loss)


@pytest.mark.parametrize("of", ["x", "layers.1.weight", "entered"])
def test_a_backward_to_some_tensors_that_layers_cut_off_is_refused(of: str) -> None:
    steps = vectors(2, steps=1)
    plan = plan_for(make(), steps[0][0], loss_of, accumulation=2, home="cuda")
    with pytest.raises(InputError, match=r"backward\(inputs=\).*pass_size=1"):
        in_passes(make, steps, plan, asking(of, "inputs", []))


def test_a_library_in_the_place_of_backward_is_called_in_a_pass_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = torch.autograd._engine_run_backward, []  # type: ignore[attr-defined]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args))
        return original(*args, **kwargs)

    look = seeing_asked_gradients(lambda outputs, inputs, kept: None)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", counted)
    weight = torch.ones(2, requires_grad=True)
    with look:
        torch.autograd.grad(weight.sum(), weight)
    assert len(calls) == 1
    assert torch.autograd._engine_run_backward is counted  # type: ignore[attr-defined]
    with seeing_asked_gradients(lambda outputs, inputs, kept: None):
        monkeypatch.setattr(torch.autograd, "_engine_run_backward", original)
    assert torch.autograd._engine_run_backward is original  # type: ignore[attr-defined]
