"""Values that modules give themselves on meta, and those that weights give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper.assemble.weight_source import OwnInitialisation, WeightSource


class Sums(nn.Module):
    """Makes one weight from others, of which one has its values already and one is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.empty(2, device="meta")) for _ in range(2))
        self.c = nn.Parameter(torch.full((2,), 7.0))
        self.register_parameter("d", None)
        self.register_buffer("none", None)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.a.fill_(1.0)
            self.b.copy_(self.a)
            self.b.add_(self.c.to(self.b.device))


class Tables(nn.Module):
    """Has buffers on meta, which it writes, replaces, or leaves as they are."""

    def __init__(self, *left: str) -> None:
        super().__init__()
        self.left = left
        for name in ("written", "replaced", "partial", "gone", "later"):
            self.register_buffer(name, torch.empty(2, device="meta"))
        for name in ("count", "index"):
            self.register_buffer(name, torch.empty(2, device="meta", dtype=torch.int64))
        self.register_buffer("none", None)
        self.register_buffer("real", torch.ones(2))

    def reset_parameters(self) -> None:
        self.written.fill_(1.0)
        self.replaced = torch.full((2,), 2.0)
        self.partial[: 1 if "partial" in self.left else 2] = 3.0
        self.gone = None if "gone" in self.left else torch.ones(2)
        self.later = torch.empty(2, device="meta" if "later" in self.left else "cpu").fill_(4.0)
        self.index = torch.arange(2)
        if "count" not in self.left:
            self.count.zero_()


class Scaled(nn.Module):
    """Takes its values from a method of the model around it, since it cannot reset itself without an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))
        self.register_buffer("table", torch.empty(2, device="meta"))
        self._init_weights = None

    def reset_parameters(self, scale: float) -> None:
        raise AssertionError("nobody knows the scale")


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Scaled):
            with torch.no_grad():
                module.weight.fill_(5.0)
            module.table.fill_(6.0)


def test_modules_give_their_weights_values_together_if_they_cannot_alone() -> None:
    model = Sums()
    before = torch.get_rng_state()
    own = OwnInitialisation(model, 0)
    assert (own.parameter("a").tolist(), own.parameter("b").tolist()) == ([1.0] * 2, [8.0] * 2)
    assert model.a.is_meta
    assert model.b.is_meta
    assert model.c.tolist() == [7.0] * 2
    own.fill_buffers()
    around = Around()
    own = OwnInitialisation(around, 0)
    assert own.parameter("inner.weight").tolist() == [5.0] * 2
    own.fill_buffers()
    assert around.inner.table.tolist() == [6.0] * 2
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("left", ["", "partial", "gone", "later", "count"])
def test_buffers_are_written_or_replaced_by_their_module_or_named(left: str) -> None:
    model: Any = nn.Sequential(Tables(left))
    own = OwnInitialisation(model, 0)
    if left:
        with pytest.raises(InputError, match=rf"^buffers 0\.{left} are on meta"):
            own.fill_buffers()
        return
    own.fill_buffers()
    found = {name: each.tolist() for name, each in model[0].named_buffers()}
    expected = {"written": 1.0, "replaced": 2.0, "partial": 3.0, "gone": 1.0, "later": 4.0, "count": 0, "real": 1.0}
    assert found == {name: [value] * 2 for name, value in expected.items()} | {"index": [0, 1]}


def kept() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_buffer("seen", torch.zeros(2))
    return model


def test_given_values_replace_weights_and_buffers_that_are_saved(caplog: pytest.LogCaptureFixture) -> None:
    model = kept()
    given: dict[str, Any] = {name: torch.ones(2) for name in ("bias", "cache", "seen", "more")}
    source = WeightSource(model, given, strict=False)
    assert "the weights given are not all of Linear: missing weight, unexpected cache, more" in caplog.text
    assert (source.replaces("bias"), source.replaces("weight")) == (True, False)
    assert torch.equal(source.parameter("bias"), torch.ones(2))
    assert torch.equal(source.parameter("weight"), model.weight)
    source.fill_buffers()
    assert (model.cache.tolist(), model.seen.tolist()) == ([0.0] * 2, [1.0] * 2)
    assert model.seen is not given["seen"]
    assert not any(map(WeightSource(model).replaces, ("bias", "weight")))
    rounded = {"bias": torch.ones(2, dtype=torch.bfloat16)}
    assert WeightSource(model, rounded, strict=False).parameter("bias").dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"bias must have shape \[2\], the weights given have list"):
        WeightSource(model, {"bias": [1.0, 1.0]}, strict=False).parameter("bias")  # type: ignore[dict-item]
