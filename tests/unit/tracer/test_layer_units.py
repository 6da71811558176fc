"""Units: which layers of a model they are, and which accesses of a step belong to each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.errors import InputError
from elixir.models.layer_units import layer_units
from elixir.step_trace import Result, StepShape, StepTrace, Unit, UnitActivations
from tests.common.tracing import cpu_trace, sum_step


class Layer(nn.Module):
    """Two products."""

    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, inner), nn.Linear(inner, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Layers between two products, checkpointed one by one where told, or all in one checkpoint."""

    def __init__(self, *inner: int, recompute: str = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.begin, self.end = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(map(Layer, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        if self.recompute == "all":
            x = checkpoint(self._run, x, use_reentrant=False)  # type: ignore[assignment]
        else:
            for layer in self.layers:
                again = self.recompute == "each"
                x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)  # type: ignore[assignment]
        result: torch.Tensor = self.end(x)
        return result

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


INP = {"x": torch.ones(2, 4)}


def runs(trace: StepTrace) -> list[tuple[str, str, int, int]]:
    return [(trace.units[run.unit].name, run.phase, run.first, run.last) for run in trace.unit_runs]


def test_checkpointed_layers_run_again_in_backward() -> None:
    trace = cpu_trace(Stack(8, 8, recompute="each"), INP, sum_step)
    assert trace.units == (
        Unit("layers.0", "checkpointed", "Layer", "either"),
        Unit("layers.1", "checkpointed", "Layer", "either"),
    )
    assert runs(trace) == [
        ("layers.0", "forward", 1, 2), ("layers.1", "forward", 3, 4), ("layers.1", "recompute", 7, 8),
        ("layers.1", "backward", 9, 10), ("layers.0", "recompute", 11, 12), ("layers.0", "backward", 13, 14),
    ]  # fmt: skip


def test_a_unit_that_runs_twice_has_a_run_for_each_call() -> None:
    class Twice(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    trace = cpu_trace(Twice(8, 8), INP, sum_step)
    forward = [("layers.0", 1, 2), ("layers.1", 3, 4), ("layers.0", 7, 8), ("layers.1", 9, 10)]
    assert [(name, *span) for name, phase, *span in runs(trace) if phase == "forward"] == forward


def test_compiled_modules_are_units_before_repeated_layers() -> None:
    model = Stack(8, 8, 8)
    model.layers[0].compile(backend="eager")
    model.layers[1].get_submodule("up").compile(backend="eager")
    model.end.compile(backend="eager")
    model.get_submodule("layers.0.down").compile(backend="eager")
    found = {unit.name: unit.form for unit in layer_units(model).values()}
    assert found == {"end": "compiled", "layers.0": "compiled", "layers.1.up": "compiled", "layers.2": "plain"}
    every = {unit.name: unit.form for unit in layer_units(model, compile=True).values()}
    assert every == {"end": "compiled"} | {f"layers.{index}": "compiled" for index in range(3)}
    trace = cpu_trace(model, INP, sum_step)
    assert {unit.name: unit.form for unit in trace.units} == found
    assert trace.step.compiled == ("end", "layers.0", "layers.1.up")
    first = next(first for name, phase, first, _ in runs(trace) if (name, phase) == ("layers.0", "forward"))
    used = {trace.parameters[index].name for index in trace.accesses[first].parameters}
    assert used == {f"layers.0.{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")}


def test_a_checkpointed_part_of_a_repeated_layer_lies_in_its_unit() -> None:
    model = nn.Sequential(Stack(8, 8), Stack(8, 8))
    found = layer_units(model, checkpointed=["0.layers.1", "Sequential", "1"])
    assert [(unit.name, unit.form) for unit in found.values()] == [("0", "plain"), ("1", "checkpointed")]


@pytest.mark.parametrize("options", [{"keep": ()}, {"keep": None, "swap": (Result("aten.mm.default", 0),)}])
def test_activations_of_a_unit_that_is_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="'layers.9'"):
        cpu_trace(Stack(8, 8), INP, sum_step, shape=StepShape(activations=(UnitActivations("layers.9", **options),)))


def test_the_forward_of_units_is_known_operator_by_operator() -> None:
    trace = cpu_trace(Stack(8, 8), INP, sum_step)
    (forward,) = trace.forwards
    assert forward.units == ("layers.0", "layers.1")
    assert [made.operator for made in forward.operators] == [
        "aten.addmm.default", "aten.tanh.default", "aten.addmm.default", "aten.add.Tensor"
    ]  # fmt: skip
    assert [made.operation and trace.operations[made.operation].flops for made in forward.operators] == [128, 0, 128, 0]
    assert [(made.made_bytes, made.saved_bytes, made.keepable) for made in forward.operators] == [
        (64, 0, True), (64, 64, True), (32, 0, True), (32, 0, True)
    ]  # fmt: skip
    assert (forward.again, forward.accesses_again) == (2, 2)
