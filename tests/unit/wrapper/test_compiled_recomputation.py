"""Compiled layers are kept or recomputed whole: bits, weights of the second run, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmark.observe import observe_step
from elixir.access.activations import Recomputation, recomputing
from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.search import optimal_search
from elixir.search.advise.activations import trace_that_keeps
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.step_trace import Result, UnitActivations
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.run_options import Debug
from tests.common.parity import MODES, Case
from tests.common.tracing import CPU
from tests.unit.search.test_activations import step_of, wide
from tests.unit.wrapper.test_compiled_layers import compiled, fresh, plan_of, train


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    fresh()
    yield
    fresh()


class Layer(nn.Module):
    """Draws random numbers, of which backward must see the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.5, self.training))
        return x + made


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack() -> Case:
    torch.manual_seed(0)
    return Case(Stack(), {"x": torch.randn(8, 16)}, lambda model, inp: model(inp["x"]).square().mean())


def whole(*again: bool, layers: str = "layers") -> tuple[UnitActivations, ...]:
    """Activations by layer: `again` says which of them run again."""
    return tuple(UnitActivations(f"{layers}.{number}", () if each else None) for number, each in enumerate(again))


def with_activations(plan: Plan, own: Sequence[UnitActivations]) -> Plan:
    return replace(plan, step=replace(plan.step, activations=tuple(own)))


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_run_again_give_the_bits_of_those_that_do_not(mode: str) -> None:
    it = stack()
    plain = compiled(copy.deepcopy(it.model))
    torch.manual_seed(1)
    wanted = train(it, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    fresh()
    compiled(it.model)
    plan = with_activations(plan_of(it, mode), whole(True, False, True, True))
    assert Plan.from_json(plan.to_json()) == plan
    model = ElixirModule(it.model, plan, device="cpu", debug=Debug(poison=True))
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch.manual_seed(1)
    assert train(it, model, optimizer) == wanted
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    model.close()
    torch.manual_seed(1)
    again = it.loss(it.model, it.inp)
    assert torch.isfinite(again)


def counting(calls: list[str], name: str) -> Any:
    """A backend that notes each call of the code of forward."""

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(name)
            return graph.forward(*args)

        return run

    return backend


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_layers_compiled_anew_run_again_until_the_model_is_closed(mode: str) -> None:
    it, calls = stack(), list[str]()

    def compile_anew(name: str) -> None:
        for layer in it.model.layers:  # type: ignore[union-attr]
            layer.compile(backend=counting(calls, name))

    def runs(model: nn.Module) -> list[str]:
        fresh()
        calls.clear()
        it.loss(model, it.inp).backward()
        return list(calls)

    compile_anew("first")
    assert runs(it.model) == ["first"] * 4
    plan = with_activations(plan_of(it, mode), whole(True, False, True, False))
    it.model.zero_grad()
    model = ElixirModule(it.model, plan, device="cpu")
    assert runs(model) == ["first"] * 6
    compile_anew("second")
    assert runs(model) == ["second"] * 6
    model.zero_grad()
    model.rehome(with_activations(plan, whole(False, False, False, True)))
    assert runs(model) == ["second"] * 5
    model.close()
    assert runs(it.model) == ["second"] * 4


def test_what_is_refused() -> None:
    it = stack()
    compiled(it.model)
    with pytest.raises(InputError, match="is compiled, so its results cannot be kept one by one"):
        Recomputation(it.model, [UnitActivations("layers.0", (Result("aten.addmm.default", 0),))])
    model = wide(layers=2)
    compiled(model.model)
    request = SearchRequest(world_size=1, optimizer_type="AdamW", accumulation=2, pass_size=2, activations="auto")
    step = StepQuestion(model=model.model, inp=model.inp, step_fn=step_of(model))
    with pytest.raises(InputError, match=r"kept or recomputed whole, micro-batch by micro-batch \(pass_size=1\)"):
        trace_that_keeps(step, CPU, request)


def test_passes_of_several_micro_batches_take_layers_of_which_some_are_compiled() -> None:
    it = wide(layers=2)
    it.model.model.layers[0].compile(backend="aot_eager")  # type: ignore[union-attr, index, operator]
    step = StepQuestion(model=it.model, inp=it.inp, step_fn=step_of(it))
    request = SearchRequest(world_size=1, optimizer_type="AdamW", accumulation=2, pass_size=2, activations="auto")
    assert trace_that_keeps(step, CPU, request).step.activations == (UnitActivations("model.layers.1", ()),)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_the_search_keeps_or_recomputes_each_layer_whole(backend: str) -> None:
    it = wide()
    options: dict[str, Any] = {"inp": it.inp, "step_fn": step_of(it), "hardware": "cpu", "activations": "auto"}
    options |= {"host_budget": "1GiB", "optimizer_type": "AdamW", "assume": "nominal"}
    compiled(it.model, backend)
    roomy = optimal_search(it.model, 1, **options, device_memory="1GiB")
    assert roomy.plan.activations == ()
    most, least = roomy.trace.activation_peak_bytes, roomy.trace.step
    tight = optimal_search(it.model, 1, **options, device_memory=int(0.7 * most) + 2**20)
    assert {each.keep for each in tight.plan.activations} == {(), None} or {
        each.keep for each in tight.plan.activations
    } == {()}
    assert not any(each.swap for each in tight.plan.activations)
    assert tight.plan.step.compiled == least.compiled
    assert tight.plan.predicted.device_peak_bytes <= int(0.7 * most) + 2**20
    assert ("generates" in tight.trace.assumptions[-1]) == (backend == "inductor")


@pytest.mark.slow
def test_the_peak_of_layers_that_run_again_is_that_of_a_real_step() -> None:
    it = wide()
    compiled(it.model, "inductor")
    own = whole(True, False, True, True, layers="model.layers")
    step = StepQuestion(model=it.model, inp=it.inp, step_fn=step_of(it), activations=own)
    trace = step.trace(CPU)
    assert "generates" in trace.assumptions[-1]
    with recomputing(it.model, own):
        for _ in range(2):
            step_of(it)(it.model, it.inp)
            it.model.zero_grad()
        real = observe_step(it.model, it.inp, step_of(it)).peak_bytes
    assert trace.backward_peak_bytes - trace.resting_bytes == pytest.approx(real, rel=0.002)
