"""Units: which layers of a model they are, and which accesses of a step belong to each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.errors import InputError
from elixir.models.layer_units import layer_units, repeated_layers
from elixir.search.problem.coarse_trace import joined_trace
from elixir.step_trace import Result, StepShape, StepTrace, Unit, UnitActivations
from tests.common.tracing import cpu_trace, sum_step
from tests.unit.wrapper import test_units_as_one


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


def test_units_are_the_repeated_layers_and_have_runs() -> None:
    trace = cpu_trace(Stack(8, 8, 16), INP, sum_step)
    assert trace.units == (
        Unit("layers.0", "plain", "Layer", "either"), Unit("layers.1", "plain", "Layer", "either"), Unit("layers.2", "plain", "Layer 2", "either"),
    )  # fmt: skip
    # Forward: begin, two products a layer, end. Backward: end, each layer from its last product on; begin's input needs
    # no gradient.
    assert runs(trace) == [
        ("layers.0", "forward", 1, 2), ("layers.1", "forward", 3, 4), ("layers.2", "forward", 5, 6),
        ("layers.2", "backward", 9, 10), ("layers.1", "backward", 11, 12), ("layers.0", "backward", 13, 14),
    ]  # fmt: skip
    assert trace.step.compiled == ()


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


def test_a_checkpoint_around_all_layers_is_no_unit() -> None:
    trace = cpu_trace(Stack(8, 8, recompute="all"), INP, sum_step)
    assert [(unit.name, unit.form) for unit in trace.units] == [("layers.0", "plain"), ("layers.1", "plain")]
    assert [phase for _, phase, _, _ in runs(trace)] == ["forward"] * 2 + ["recompute"] * 2 + ["backward"] * 2


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


def test_the_model_is_no_unit_and_what_has_no_parameters_is_none() -> None:
    assert layer_units(nn.Linear(4, 4)) == {}
    assert layer_units(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(4, 4)), checkpointed=["0"]) == {}
    model = Stack(8, 8)
    assert next(iter(layer_units(model, checkpointed=["begin"]).values())) == Unit(
        "begin", "checkpointed", "Linear", "either"
    )


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


class KeepsAView(test_units_as_one.Layer):
    """Transposes a weight once, and uses that in all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.up.weight.t()
        return x + self.down(torch.tanh(x @ self.kept))


def fetches(model: nn.Module) -> set[str]:
    return {unit.fetch for unit in cpu_trace(model, INP, sum_step).units}


def test_layers_may_be_fetched_as_one_unless_they_write_choose_or_keep() -> None:
    assert fetches(test_units_as_one.Stack(test_units_as_one.Layer)) == {"either"}
    for kind in (test_units_as_one.Writes, test_units_as_one.Chooses, KeepsAView):
        assert fetches(test_units_as_one.Stack(kind)) == {"parameters"}, kind


def test_layers_that_others_read_are_fetched_by_parameter() -> None:
    tied = test_units_as_one.Stack()
    tied.begin.weight = tied.layers[1].get_submodule("up").weight
    assert [unit.fetch for unit in cpu_trace(tied, INP, sum_step).units] == ["either", "parameters", "either"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4, batch_first=True), 2)
    assert fetches(nn.ModuleDict({"a": encoder})["a"]) == {"parameters"}


class CallsParts(test_units_as_one.Stack):
    """Calls what its layers consist of, and never a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer.down(layer.up(x))
        return x


def test_layers_that_are_never_called_are_fetched_by_parameter() -> None:
    assert fetches(CallsParts()) == {"parameters"}


def test_a_list_inside_of_a_list_is_no_layer() -> None:
    model = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert list(repeated_layers(model).values()) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_layer_that_runs_a_part_again_is_fetched_by_parameter() -> None:
    trace = cpu_trace(test_units_as_one.Stack(test_units_as_one.RunsAPartAgain), INP, sum_step)
    assert trace.checkpointed_modules == ("layers.0.up", "layers.1.up", "layers.2.up")
    assert {unit.fetch for unit in trace.units} == {"parameters"}
    with pytest.raises(InputError, match=r"layers.0 is no unit of Stack that can be fetched as one"):
        joined_trace(trace, ["layers.0"])
