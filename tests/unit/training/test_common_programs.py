"""Programs that run in plain PyTorch are planned and train with its bits under every kind of plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.common.parity import MODES, Case, Pair, make_plan
from tests.common.tracing import cpu_trace


@pytest.fixture
def anomalies_detected() -> Iterator[None]:
    torch.autograd.set_detect_anomaly(True)
    yield
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("mode", MODES)
def test_anomaly_detection_from_the_start(mode: str, anomalies_detected: None) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 4))
    it = Case(model, {"input": torch.randn(4, 8)}, lambda model, inp: model(**inp).square().mean())
    with Pair(it, make_plan(it, mode, split_number=3)) as pair:
        pair.train(3)
        pair.assert_same_weights()
        assert torch.is_anomaly_enabled()
        with pytest.raises(RuntimeError, match="returned nan values"):
            pair.module(pair.case.inp["input"]).mul(0).sum().sqrt().mul(0).backward()


def product(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(z, w))


GIVEN_WEIGHTS: dict[str, Callable[..., torch.Tensor]] = {
    "a weight": lambda layer, other, x, run: x + run(product, x, layer.weight),
    "a part of one": lambda layer, other, x, run: x + run(product, x, layer.weight[:8]).sum(-1, keepdim=True),
    "another's, around a layer": lambda layer, other, x, run: run(
        lambda z, w: product(layer(product(z, w)), w), x, other.weight
    ),
    "nested": lambda layer, other, x, run: run(lambda z, w: z + run(product, z, w), x, layer.weight),
}


class Checkpointed(nn.Module):
    """Layers whose checkpointed functions are given weights."""

    def __init__(self, ways: str, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.apply_layer = GIVEN_WEIGHTS[ways]
        self.run = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = self.apply_layer(layer, self.layers[index - 1], x, self.run)
        return x


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ways", GIVEN_WEIGHTS)
def test_checkpointed_functions_that_are_given_weights(ways: str, reentrant: bool) -> None:
    # As many rows as columns: weights and activations that were mixed up would fit each other.
    inp = {"x": torch.randn(16, 16, requires_grad=True)}
    for mode, options in (("streamed", {}), ("mixed", {"evict_always": True})):
        model = Checkpointed(ways, reentrant=reentrant)
        it = Case(model, inp, lambda model, inp: model(**inp).square().mean())
        with Pair(it, make_plan(it, mode, split_number=4), **options) as pair:
            pair.train(3)


class Bounded(nn.Parameter):
    """A parameter that knows its bound."""

    bound: float

    def bounded(self) -> torch.Tensor:
        return self.clamp(-self.bound, self.bound)


class OfBounded(nn.Module):
    """Takes another branch for parameters with methods, and for those with attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.weight = Bounded(torch.randn(8, 8))
        self.weight.bound = 0.5
        self.last.weight.doubled = True  # type: ignore[attr-defined]
        self.branches: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if hasattr(self.weight, "bounded"):
            x = x @ self.weight.bounded()
            self.branches.append("bounded")
        if getattr(self.last.weight, "doubled", False):
            x = self.last(x) * 2
            self.branches.append("doubled")
        return x


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_a_class_and_with_attributes(mode: str) -> None:
    model = OfBounded()
    it = Case(model, {"x": torch.randn(4, 8)}, lambda model, inp: model(**inp).square().mean())
    trace = cpu_trace(model, it.inp, lambda model, inp: it.loss(model, inp).backward())
    assert next(p for p in trace.parameters if p.name == "weight").grad_access is not None
    assert any(access.operator == "clamp" for access in trace.accesses)

    def one_by_one(model: nn.Module) -> torch.optim.Optimizer:  # as torch does by itself on a GPU for such a class
        return torch.optim.AdamW(model.parameters(), foreach=False)

    with Pair(it, make_plan(it, mode, split_number=3), plain=OfBounded(), optimizer=one_by_one) as pair:
        pair.train(3)
        pair.assert_same_weights()
        assert pair.module.module.branches == ["bounded", "doubled"] * 3
    assert type(model.weight) is Bounded
