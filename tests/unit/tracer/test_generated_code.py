"""Compiled layers are traced as the code that inductor generates for them."""

from __future__ import annotations

import ast
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmark.compiled_peaks import passes, peak_row
from elixir.hardware import preset
from elixir.step_trace import StepTrace
from elixir.tracer import compiled
from elixir.tracer.compiled import generated_code
from elixir.tracer.trace import trace_step


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.groups = 2  # the last layer's number, too
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


def traced(
    model: nn.Module, *, compile: bool = True, hardware: str = "cpu", rows: int = 8, **options: Any
) -> StepTrace:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        model(**inp).sum().backward()

    inp = {"x": torch.zeros(rows, 16)}
    return trace_step(model, inp, step, hardware=preset(hardware), compile=compile, **options)


def moved_bytes(trace: StepTrace) -> int:
    return sum(trace.operations[index].moved_bytes for access in trace.accesses for index in access.operations)


def test_a_kind_of_layer_is_generated_once_and_takes_less() -> None:
    with torch.device("meta"):
        model = Model()
    shared: dict[Any, Any] = {}
    found, again = (traced(model, kinds=shared) for _ in range(2))
    fused, eager = traced(model, generated_code=False), traced(model, compile=False)
    assert (again.accesses, again.operations) == (found.accesses, found.operations)
    assert "generates" in found.assumptions[-1], found.assumptions  # a version may lack a private name
    assert len(shared) == 2  # the first input needs no gradient, the other two do
    more = 256 if torch.__version__ < "2.12" else -1  # what torch 2.11 generates keeps 256 bytes for longer
    assert found.backward_peak_bytes <= eager.backward_peak_bytes + more
    assert moved_bytes(found) <= moved_bytes(fused) < moved_bytes(eager)
    assert fused.backward_peak_bytes == eager.backward_peak_bytes
    assert found.flops == fused.flops == eager.flops > 0
    arrivals = [
        next(i for i, access in enumerate(found.accesses) if access.phase == "backward" and index in access.parameters)
        for index in range(len(found.parameters))
    ]
    assert [param.grad_access for param in found.parameters] == [index + 1 for index in arrivals]
    inside, after = (found.accesses[arrivals[0] + later] for later in (0, 1))  # gradients are there after the peak
    assert (after.parameters, after.module) == ((), inside.module)
    assert after.live_bytes < inside.live_bytes
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


class RunsAgain(Layer):
    """Its forward is a checkpoint, with options of that and of what runs again."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.run = checkpoint

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return self.run(super().forward, x, given=given, use_reentrant=False)  # type: ignore[return-value]


def test_for_a_gpu_layers_may_be_checkpoints() -> None:
    found = traced(made_of(RunsAgain), hardware="h100")
    assert "generates" in found.assumptions[-1], found.assumptions


HOST = torch.ones(16)


class OnHost(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x, HOST)  # type: ignore[no-any-return]


class WithAutocast(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.given or "cpu"):
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


class WithoutGradient(Layer):
    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        alike: torch.Tensor = torch.ops.elixir_tests.alike(x)
        return super().forward(x) + alike


def test_for_a_gpu_layers_whose_gradient_would_be_left_out_have_no_code() -> None:
    torch.library.define("elixir_tests::alike", "(Tensor x) -> Tensor")
    torch.library.register_fake("elixir_tests::alike", torch.empty_like)
    torch.library.impl("elixir_tests::alike", "cpu", torch.clone)
    found = traced(made_of(WithoutGradient), hardware="h100")
    assert "WithoutGradient has no generated code: UserWarning: elixir_tests::alike" in found.assumptions[-1]


def test_layers_under_autocast_of_a_gpu_have_no_code() -> None:
    assert "autocast" in traced(WithAutocast("cuda"), hardware="h100").assumptions[-1]


def test_every_private_name_is_there() -> None:
    assert generated_code.missing_name() is None


@pytest.mark.parametrize("name", generated_code.PRIVATE_NAMES)
def test_without_a_private_name_layers_are_traced_as_written_and_the_trace_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = Model()
    written = traced(model, hardware="h100", generated_code=False)
    owner, _, last = name.replace(":", ".").rpartition(".")
    monkeypatch.delattr(pkgutil.resolve_name(owner), last)
    found = traced(model, hardware="h100")
    assert found.accesses == written.accesses
    assert found.backward_peak_bytes == written.backward_peak_bytes
    assert f"this version of PyTorch has no {name}" in found.assumptions[-1]


def test_no_private_name_is_missing_in_the_table() -> None:
    listed = {name.replace(":", ".") for name in generated_code.PRIVATE_NAMES}
    for path in Path(compiled.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                taken = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                taken = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for each in taken:
                private = each.startswith("torch.") and "._" in each
                assert not private or any(name == each or name.startswith(f"{each}.") for name in listed), (path, each)
