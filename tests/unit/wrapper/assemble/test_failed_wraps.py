"""A wrap that is refused leaves the model as it was; one that fails later says that the model must be built again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from elixir.access.placeholders import is_absent
from elixir.errors import InputError
from elixir.hardware import promises
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import MODES, Case, make_plan, take_step

LOST = "wrapping had begun to move the model's weights when it failed: build the model again"


class Net(nn.Module):
    """Layers, a gain that only the constructor can give values, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.norm(x * self.gain + self.shift)


def case_of() -> Case:
    torch.manual_seed(0)
    return Case(Net(), {"x": torch.randn(4, 8)}, lambda model, inp: model(**inp).square().mean())


def state_of(model: nn.Module) -> list[Any]:
    """Everything of a model that a wrap may change, with the objects themselves."""
    found: list[Any] = [model.training]
    for module in model.modules():
        found.append((module, type(module), sorted(vars(module)), dict(module._forward_hooks)))
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        values = None if each.is_meta else each.detach().tolist()
        where = 0 if each.is_meta else each.data_ptr()
        hooks = (each._backward_hooks, getattr(each, "_post_accumulate_grad_hooks", None))
        found.append((name, id(each), type(each), dict(vars(each)), each.dtype, each.device, where, values, hooks))
    return found


def without(name: str) -> Callable[[Net], dict[str, Any]]:
    """A state dict that lacks a name."""
    return lambda model: {key: value for key, value in model.state_dict().items() if key != name}


def misshapen(model: Net) -> dict[str, Any]:
    """The last weight of a state dict has another shape."""
    return model.state_dict() | {"layers.3.bias": torch.zeros(3)}


def on_meta(model: Net, name: str) -> None:
    """Puts one tensor on meta, whose value nobody can give."""
    if name in model._buffers:
        model._buffers[name] = torch.empty(8, device="meta")
    else:
        model.register_parameter(name, nn.Parameter(torch.empty(8, device="meta")))


REFUSED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "names": (lambda model: {"weights": without("layers.3.bias")(model)}, "missing layers.3.bias"),
    "shapes": (lambda model: {"weights": misshapen(model)}, "layers.3.bias must have shape"),
    "shapes of some": (
        lambda model: {"weights": {"layers.3.bias": torch.zeros(3)}, "strict": False},
        "layers.3.bias must have shape",
    ),
    "gain": (lambda model: on_meta(model, "gain") or {}, "gain is on meta"),
    "shift": (lambda model: on_meta(model, "shift") or {}, "buffers shift are on meta"),
    "memory": (lambda model: {"reserve": "100000GiB"}, "more of host memory|more suffice"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cause", REFUSED)
def test_a_refused_wrap_leaves_the_model_exactly_as_it_was(cause: str, mode: str) -> None:
    it = case_of()
    plan, values = make_plan(it, mode), {name: each.clone() for name, each in it.model.state_dict().items()}
    options, message = REFUSED[cause]
    given = options(it.model)
    before, threads = state_of(it.model), threading.active_count()
    with pytest.raises(InputError, match=message) as raised:
        ElixirModule(it.model, plan, device="cpu", use_fused_kernels=True, **given)
    assert LOST not in getattr(raised.value, "__notes__", [])
    raised.value.with_traceback(None)
    assert state_of(it.model) == before
    assert threading.active_count() == threads
    module = ElixirModule(it.model, plan, device="cpu", weights=values)
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    take_step(optimizer, it.loss(module, it.inp))
    module.close()


def failed(it: Case, plan: Plan, error: BaseException, **options: Any) -> BaseException:
    """The error of a wrap that fails in its end."""
    with mock.patch.object(promises, "enter", side_effect=error), pytest.raises(type(error)) as raised:
        ElixirModule(it.model, plan, device="cpu", **options)
    return raised.value


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", MODES)
def test_a_wrap_that_fails_late_says_that_the_model_must_be_built_again(mode: str, kind: type[BaseException]) -> None:
    it, threads = case_of(), threading.active_count()
    plan = make_plan(it, mode, unified_dtype="bfloat16")
    error = kind("in the end")
    found = failed(it, plan, error)
    assert found is error
    assert str(error) == "in the end"
    assert found.__notes__ == [LOST]  # type: ignore[attr-defined]
    assert threading.active_count() == threads
    assert all(type(each) is nn.Parameter and is_absent(each) for each in it.model.parameters())
    with pytest.raises(InputError, match=f"this Net cannot be wrapped: {LOST}"):
        ElixirModule(it.model, plan, device="cpu")
    around = nn.Sequential(it.model)  # another model has a part of it
    with pytest.raises(InputError, match=f"this Sequential cannot be wrapped: {LOST}"):
        ElixirModule(around, plan, device="cpu")
    for read in (lambda: it.model(**it.inp), lambda: it.model.layers[0].weight.sum().item()):
        with pytest.raises(InputError, match=f"reads a weight that is nowhere: {LOST}"):
            read()
