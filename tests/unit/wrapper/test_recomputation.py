"""Units that keep some results of their forward and make the others again: bits, peaks, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmark.observe import observe_step
from elixir.access.activations import Recomputation, checkpoints_itself, recomputing
from elixir.access.module_call import checkpoint_function, unentered_function
from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.plan.activations import check_activations
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.planner import simple_plan
from elixir.search.request import SearchRequest
from elixir.step_trace import INPUT, Result, StepShape, StepTrace, Unit, UnitActivations
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import COUNTED, Case, Pair, assert_as_planned, case, mixed, square_loss
from tests.common.tracing import cpu_trace, sum_step
from tests.unit.wrapper.test_units_as_one import INP, Stack

PRODUCTS = tuple(Result(f"aten.{name}.default", number) for name in ("mm", "addmm") for number in (0, 2))
KEPT: dict[str, tuple[Result, ...] | None] = {
    "everything": None,
    "nothing": (),
    "products": PRODUCTS,
    "attention": (Result("aten._scaled_dot_product_flash_attention_for_cpu.default", 0), PRODUCTS[0]),
}
_EVERY = [
    (name, own, kept, mode)
    for name in ("llama", "opt", "gpt2", "vit", "stack")
    for own in ("none", "non-reentrant", "reentrant")
    for kept in KEPT
    for mode in ("streamed", "mixed")
    if not (name in ("vit", "stack") and own != "none")
]
_FIRST = ("llama", "none", "products", "streamed")


def made(name: str, own: str) -> Case:
    if name != "stack":
        return case(name, own)
    torch.manual_seed(0)
    return Case(Stack(), INP, square_loss)


def traced(it: Case, kept: str, *, by_turns: bool = True) -> StepTrace:
    """The step of a case, whose layers keep something, all or by turns."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    units = cpu_trace(it.model, it.inp, step).units
    own = tuple(UnitActivations(unit.name, KEPT[kept] if n % 3 or not by_turns else ()) for n, unit in enumerate(units))
    return cpu_trace(it.model, it.inp, step, shape=StepShape(activations=own))


def plan_that_keeps(it: Case, kept: str, request: SearchRequest | None = None, *, where: str = "cpu") -> Plan:
    """A plan of a step whose layers keep something by turns."""
    request = request or SearchRequest(world_size=1, optimizer_type="AdamW")
    options: dict[str, Any] = {"split_number": 12, "allocate_factor": 1.0, "shard_device": where}
    return simple_plan(traced(it, kept), preset("cpu"), request, **options)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "own", "kept", "mode"), sorted(_EVERY, key=_FIRST.__ne__))
def test_same_bits_and_loads_as_planned(name: str, own: str, kept: str, mode: str) -> None:
    it = made(name, own)
    plan = plan_that_keeps(it, kept)
    assert Plan.from_json(plan.to_json()) == plan
    with Pair(it, mixed(plan) if mode == "mixed" else plan, device="cpu") as pair:
        pair.train(4)
        pair.assert_same_weights()
        assert_as_planned(pair.module, COUNTED if mode == "streamed" else ())


@pytest.mark.sampled
@pytest.mark.parametrize("kept", ["attention", "products"])
def test_the_peak_of_a_real_step(kept: str) -> None:
    it = case("llama", hidden_size=128, intermediate_size=352, num_hidden_layers=4)
    trace = traced(it, kept)
    assert {unit.form for unit in trace.units} == {"checkpointed"}

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    with recomputing(it.model, trace.step.activations):
        step(it.model, it.inp)
        it.model.zero_grad()
        real = observe_step(it.model, it.inp, step).peak_bytes
    predicted = trace.backward_peak_bytes - trace.param_bytes - trace.buffer_bytes
    assert predicted == pytest.approx(real, rel=0.005)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("own", ["none", "non-reentrant"])
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_a_plan_outlasts_checkpoints_that_are_switched_on_after_wrapping(
    own: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    it = case("llama", own)
    plan = plan_that_keeps(it, "products", where="cpu" if mode == "streamed" else "cuda")
    model = ElixirModule(it.model, plan, device="cpu")
    layer = it.model.model.layers[1]
    kept = unentered_function(layer)
    it.model.gradient_checkpointing_enable()
    chosen = unentered_function(layer)
    assert chosen is not kept
    for _ in range(2):
        it.loss(model, it.inp)
        assert unentered_function(layer) is kept
    assert caplog.text.count("activation checkpointing was switched on or off after wrapping") == 1
    model.close()
    assert checkpoint_function(layer) is chosen
    assert checkpoints_itself(layer)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 runs the layer again, and all of it")
def test_a_second_backward_over_kept_results_is_refused_in_words() -> None:
    it = case("llama", "none")
    model = ElixirModule(it.model, plan_that_keeps(it, "products"), device="cpu")
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters()))
    loss = it.loss(model, it.inp)
    optimizer.backward(loss, retain_graph=True)
    with pytest.raises(InputError, match="results of its operators for one backward only; add the losses up"):
        optimizer.backward(loss)


def _fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the layer failed")


@pytest.mark.parametrize(
    ("again", "error", "says"),
    [
        (lambda x: x @ torch.eye(4), InputError, "a layer did something else when it ran again in backward than in forward"),
        (_fails, RuntimeError, "^the layer failed$"),
    ],
)  # fmt: skip
def test_a_layer_that_does_something_else_when_it_runs_again_is_told(again: Any, error: Any, says: str) -> None:
    it = made("stack", "none")
    model = ElixirModule(it.model, plan_that_keeps(it, "products"), device="cpu")
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters()))
    layer: Any = it.model.layers[1].up
    forward, runs = layer.forward, []

    def changing(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return forward(again(x) if len(runs) > 1 else x)

    layer.forward = changing
    with pytest.raises(error, match=says):
        optimizer.backward(it.loss(model, it.inp))


def test_what_is_refused() -> None:
    keep = UnitActivations("layers.0", PRODUCTS)
    with pytest.raises(InputError, match=r"no unit 'layers.7'"):
        cpu_trace(Stack(), INP, sum_step, shape=StepShape(activations=(replace(keep, unit="layers.7"),)))
    for wrong, why in (
        ([keep, keep], "name each unit once"),
        ([replace(keep, unit="layers")], "no unit of the step"),
        ([replace(keep, keep=PRODUCTS * 2)], "name each result once"),
        ([replace(keep, keep=(Result(INPUT, 0),))], "name results of operators"),
    ):
        with pytest.raises(InputError, match=why):
            check_activations(wrong, [Unit("layers.0", "plain", "Layer", "either")])
    compiled = Stack()
    compiled.layers[0].compile()
    with pytest.raises(InputError, match="is compiled"):
        Recomputation(compiled, [keep])
    with pytest.raises(InputError, match="give the model, not the trace"):
        plan_from_trace(cpu_trace(Stack(), INP, sum_step), preset("cpu"), 1, activations="auto")
