"""The use order, derived by hand for models small enough to do so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.step_trace import StepTrace
from tests.common.tracing import cpu_trace, sum_step

Event = tuple[str, tuple[str, ...], str]


class Mlp(nn.Module):
    """Two linear layers, checkpointed one by one where told."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(16, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.second):
            if self.recompute == "none":
                x = part(x)
            else:
                x = checkpoint(part, x.requires_grad_(), use_reentrant=self.recompute == "reentrant")  # type: ignore[assignment]
        return x


INP = {"x": torch.ones(2, 8)}


def events(trace: StepTrace) -> list[Event]:
    """(phase, names, module) of every access."""
    return [
        (event.phase, tuple(trace.parameters[index].name for index in event.parameters), event.module)
        for event in trace.accesses
    ]


def first_and_second() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("first.0.weight", "first.0.bias"), ("second.0.weight", "second.0.bias")


def test_two_layers_recomputed_without_reentrance() -> None:
    trace = cpu_trace(Mlp("non-reentrant"), INP, sum_step)
    order = events(trace)
    first, second = first_and_second()
    assert [e for e in order if e[0] == "forward"] == [("forward", first, "first.0"), ("forward", second, "second.0")]
    assert [e for e in order if e[0] == "recompute"] == [
        ("recompute", second, "second.0"),
        ("recompute", first, "first.0"),
    ]
    assert [e[1] for e in order if e[0] == "backward"] == [("second.0.weight",), ("first.0.weight",)]
    assert trace.checkpointed_modules == ("first", "second")


@pytest.mark.parametrize(("recompute", "arrivals"), [("none", 1), ("non-reentrant", 1), ("reentrant", 2)])
def test_a_layer_used_twice_gets_a_gradient_from_each_backward_inside_backward(recompute: str, arrivals: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in (self.shared, self.frozen, self.shared):
                if recompute == "none":
                    x = part(x)
                else:
                    x = checkpoint(part, x.requires_grad_(), use_reentrant=recompute == "reentrant")  # type: ignore[assignment]
            return x

    trace = cpu_trace(Twice(), INP, sum_step)
    found = {param.name: param.grad_arrivals for param in trace.parameters}
    assert found == {"shared.weight": arrivals, "shared.bias": arrivals, "frozen.weight": 0, "frozen.bias": 0}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_function_is_recognised(reentrant: bool) -> None:
    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: torch.tanh(x @ self.a) @ self.b, x.requires_grad_(), use_reentrant=reentrant)  # type: ignore[return-value]

    order = events(cpu_trace(Runs(), INP, sum_step))
    assert [e[1] for e in order if e[0] == "forward"] == [("a",), ("b",)]
    assert [e[1] for e in order if e[0] == "recompute"] == [("a",), ("b",)]
    assert [e[1] for e in order if e[0] == "backward"] == [("b",), ("a",)]


def test_costs_belong_to_the_access_before_them() -> None:
    trace = cpu_trace(Mlp(), {"x": torch.ones(32, 8)}, sum_step)
    flops = [sum(trace.operations[index].flops for index in event.operations) for event in trace.accesses]
    assert flops[0] == 2 * 32 * 8 * 16
    assert flops[1] == 2 * 32 * 16 * 4 + 0
    # In backward the last layer's weight, its input, and the first layer's weight.
    assert flops[2] == 2 * 32 * (16 * 4 + 16 * 4 + 8 * 16)
    assert all(sum(trace.operations[at].moved_bytes for at in event.operations) > 0 for event in trace.accesses)


def test_frozen_parameters_are_used_and_get_no_gradient() -> None:
    model = Mlp()
    model.first.requires_grad_(False)
    trace = cpu_trace(model, INP, sum_step)
    by_name = {p.name: p for p in trace.parameters}
    assert not by_name["first.0.weight"].trainable
    assert by_name["first.0.weight"].grad_access is None
    assert by_name["second.0.weight"].grad_access is not None
    assert trace.unused_parameters == ()
    assert trace.grad_bytes == (16 * 4 + 4) * 4


def test_a_tensor_that_takes_the_memory_of_a_weight_uses_it() -> None:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        weight = model.get_parameter("second.0.weight")

        def take(*_: object) -> None:
            with torch.no_grad():
                torch.empty(0).set_(weight)

        handle = model.get_submodule("first.0").register_forward_pre_hook(take)
        sum_step(model, inp)
        handle.remove()

    found = events(cpu_trace(Mlp(), INP, step))
    assert next(event for event in found if event[2]) == ("forward", ("second.0.weight",), "first.0")


def test_what_is_read_outside_of_modules_is_used_each_time_and_at_once() -> None:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        turned = model.get_parameter("weight").t()
        read = turned.sum() + turned.mean() + model.get_parameter("weight").sum()
        (model(inp["x"]).sum() + read).backward()

    trace = cpu_trace(nn.Linear(8, 4), INP, step)
    found = [(access.operator, access.parameters, access.pin_until) for access in trace.accesses]
    assert found == [("t", (0,), 0), ("sum", (0,), 1), ("mean", (0,), 2), ("sum", (0,), 3), ("linear", (0, 1), 4)]
