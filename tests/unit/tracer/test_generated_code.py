"""Compiled layers are traced as the code that inductor generates for the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmark.compiled_peaks import passes, peak_row
from elixir.hardware import preset
from elixir.step_trace import StepTrace
from elixir.tracer import generated_code
from elixir.tracer.trace import trace_step


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x), approximate="tanh"))
        return result


class Model(nn.Module):
    def __init__(self, given: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, range(3)))
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.given)
        return x


def traced(model: nn.Module, *, compile: bool = True, **options: Any) -> StepTrace:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        model(**inp).sum().backward()

    return trace_step(model, {"x": torch.zeros(8, 16)}, step, hardware=preset("cpu"), compile=compile, **options)


def moved_bytes(trace: StepTrace) -> int:
    return sum(trace.operations[index].moved_bytes for access in trace.accesses for index in access.operations)


def test_a_kind_of_layer_is_generated_once_and_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []
    real = generated_code._generated
    monkeypatch.setattr(generated_code, "_generated", lambda *args: kinds.append(args[0]) or real(*args))
    with torch.device("meta"):
        model = Model()
    shared: dict[Any, Any] = {}
    found, again = (traced(model, kinds=shared) for _ in range(2))
    fused, eager = traced(model, generated_code=False), traced(model, compile=False)
    assert (again.accesses, again.operations) == (found.accesses, found.operations)
    assert "generates" in found.assumptions[-1], found.assumptions  # a version may lack a private name
    assert len(kinds) == 2  # the first input needs no gradient, the other two do
    assert found.backward_peak_bytes < eager.backward_peak_bytes
    assert moved_bytes(found) <= moved_bytes(fused) < moved_bytes(eager)
    assert fused.backward_peak_bytes == eager.backward_peak_bytes
    assert found.flops == fused.flops == eager.flops > 0
    assert [param.grad_access for param in found.parameters] == [
        next(i for i, access in enumerate(found.accesses) if access.phase == "backward" and index in access.parameters)
        for index in range(len(found.parameters))
    ]
    assert all(layer._compiled_call_impl is None for layer in model.layers)


def test_layers_without_generated_code_are_traced_uncompiled() -> None:
    model = Model(given=object())
    found, eager = traced(model), traced(model, generated_code=False)
    assert "an object among its arguments" in found.assumptions[-1]
    assert found.accesses == eager.accesses


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant"])
def test_the_peak_is_that_of_a_real_compiled_step(checkpoint: str) -> None:
    row = peak_row("llama", checkpoint, 0.1, torch.float32)
    assert passes(row), row


@pytest.mark.slow
def test_the_peak_is_that_of_a_real_step_compiled_under_a_memory_budget() -> None:
    with pytest.importorskip("torch._functorch.config").patch(activation_memory_budget=0.5):
        row = peak_row("llama", "none", 0.0, torch.float32)
    assert passes(row), row


HOST = torch.ones(16)


class OnHost(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x, HOST)  # type: ignore[no-any-return]


class WithAutocast(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return super().forward(x)


class SetsGrad(Layer):
    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        x = x.detach()
        x.requires_grad = True
        return super().forward(x)


class KeepsSome(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.run = checkpoint

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return self.run(super().forward, x, use_reentrant=False, context_fn=kept)  # type: ignore[return-value]


class HasConstants(Layer):
    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return super().forward(x + torch.tensor([0.1 * number for number in range(16)]))


def made_of(layer: type[Layer]) -> Model:
    model = Model()
    model.layers = nn.ModuleList(map(layer, range(2)))
    return model


def tuned() -> Model:
    model = Model()
    for layer in model.layers:
        layer.compile(options={"max_autotune": True})
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (OnHost, "a tensor on the host among its arguments"),
        (WithAutocast, "autocast"),
        (tuned, "code that is chosen by running it"),
        (partial(made_of, SetsGrad), "it sets requires_grad"),
        (partial(made_of, KeepsSome), "a checkpoint that keeps some results"),
        (partial(made_of, HasConstants), "generated code of another form"),
    ],
)
def test_layers_that_inductor_cannot_be_asked_for_say_why(make: Any, why: str) -> None:
    assert why in traced(make()).assumptions[-1]
