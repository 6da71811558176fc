"""Gradients with respect to what a caller names, and backwards that begin in the middle of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.access.interception import TrackedView
from elixir.errors import InputError
from tests.common import inside
from tests.common.parity import MODES, Case, Pair, assert_as_planned, make_plan

NAMES = ("second.weight", "last.bias")


class Net(nn.Module):
    """Four layers with a chunk each; the middle ones are recomputed, and a view of the first is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.recompute = False
        self.hidden: torch.Tensor
        self.view: torch.Tensor

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(x).tanh()).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.view = self.first.weight.t()
        x = (x @ self.view + self.first.bias).tanh()
        x = checkpoint(self._middle, x, use_reentrant=False) if self.recompute else self._middle(x)
        self.hidden = x
        return self.last(x)


def square(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = model(**inp).square().mean()
    return result


def made(mode: str, recompute: bool = False) -> Pair:
    torch.manual_seed(0)
    model = Net()
    model.recompute = recompute
    it = Case(model, {"x": torch.randn(4, 8)}, square)
    return Pair(it, make_plan(it, mode, split_number=4))


@pytest.fixture(params=MODES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with made(request.param) as it:
        it.train(1)
        yield it
        assert not any(chunk.pins for chunk in inside.chunks(it.module))
        it.train(2)  # with nothing left over
        assert_as_planned(it.module, ())


def both(pair: Pair) -> list[tuple[nn.Module, Any]]:
    """The function to call, and the model inside."""
    return [(pair.module, pair.module.module), (pair.plain, pair.plain)]


ASKS: dict[str, Callable[[Any, torch.Tensor], list[torch.Tensor]]] = {
    "weights": lambda net, x: [net.get_parameter(name) for name in NAMES],
    "input": lambda net, x: [x],
    "weights and input": lambda net, x: [net.second.weight, x, net.first.bias],
    "hidden": lambda net, x: [net.hidden, net.last.weight],
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asks", ASKS)
def test_grad_gives_what_plain_pytorch_does(asks: str, mode: str, recompute: bool) -> None:
    with made(mode, recompute) as pair:
        found = []
        for model, net in both(pair):
            x = pair.case.inp["x"].clone().requires_grad_()
            found.append(torch.autograd.grad(square(model, {"x": x}), ASKS[asks](net, x)))
        assert all(torch.equal(mine, plain) for mine, plain in zip(*found, strict=True))
        assert not inside.holds_gradients(pair.module)
        pair.train(2)


def test_grad_of_a_view(pair: Pair) -> None:
    found = []
    for model, net in both(pair):
        loss = square(model, pair.case.inp)
        found.extend(torch.autograd.grad(loss, net.view))
    assert torch.equal(*found)


def _grad_takes_dicts() -> bool:
    x = torch.ones((), requires_grad=True)
    try:
        return isinstance(torch.autograd.grad(2 * x, {"x": x}), dict)  # type: ignore[call-overload]
    except RuntimeError:
        return False


@pytest.mark.skipif(not _grad_takes_dicts(), reason="this PyTorch takes no dict of inputs")
def test_grad_with_respect_to_a_dict(pair: Pair) -> None:
    for model, net in both(pair):
        model(**pair.case.inp)
        asked = {"a": net.third.weight, "b": net.last.weight}
        found = torch.autograd.grad(net.hidden.sum(), asked, materialize_grads=True)
        assert found["a"].abs().sum() > 0
        assert torch.equal(found["b"].cpu(), torch.zeros(3, 8))


BACKWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "grad": lambda hidden, x: torch.autograd.grad(hidden, x)[0],
    "inputs": lambda hidden, x: hidden.backward(inputs=[x]),
    "all": lambda hidden, x: hidden.backward(),
}


@pytest.mark.parametrize("how", BACKWARDS)
def test_a_backward_may_begin_in_the_middle(pair: Pair, how: str) -> None:
    """No output of the model tells that it runs; its chunks are let go of all the same."""
    found = []
    for model, net in both(pair):
        x = pair.case.inp["x"].clone().requires_grad_()
        model(x)
        result = BACKWARDS[how](net.hidden.sum(), x)
        found.append(x.grad if result is None else result)
    assert torch.equal(*found)
    assert not any(chunk.pins for chunk in inside.chunks(pair.module))
    pair.step()


def test_what_the_graph_has_saved_can_be_looked_at(pair: Pair) -> None:
    shown = []
    for model, net in both(pair):
        model(**pair.case.inp)
        node = model(**pair.case.inp).grad_fn
        shown.append((node._saved_mat2, net))
    (mine, _), (plain, _) = shown
    assert not any(chunk.pins for chunk in inside.chunks(pair.module))
    pair.module(**pair.case.inp)  # other weights come into the block; with poison where it is given back
    pair.module.settle()
    assert torch.equal(mine, plain)


def test_what_cannot_be_asked_for() -> None:
    with made("streamed") as pair:
        loss = square(pair.module, pair.case.inp)
        view = pair.module.module.view
        assert type(view) is TrackedView
        with pytest.raises(InputError, match=r"give the weight itself"):
            loss.backward(inputs=[view])
        weight = pair.module.module.second.weight
        with pytest.raises(InputError, match=r"begins at a weight"):
            torch.autograd.grad(weight, [weight], torch.ones(8, 8))
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(loss, weight.requires_grad_(False))
        weight.requires_grad_(True)
        loss.backward()
        pair.optimizer.zero_grad()
        pair.train(1)
