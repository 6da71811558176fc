"""Compiled layers whose memory budget a plan chooses: numbers, choices, and the step as it is predicted."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmark.observe import observe_step
from elixir.access.recomputation import Recomputation, recomputing
from elixir.errors import InputError, PlanError, TraceError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.plan.plan import Plan
from elixir.search import optimal_search, plan_from_trace
from elixir.search.advise.activations import that_keeps_everything, trace_that_keeps
from elixir.search.advise.changes import CHOOSE_ACTIVATIONS, for_memory
from elixir.search.problem.budgeted_trace import BudgetedTraces, budgeted_units
from elixir.search.propose.kept_results import KeptResults
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.simulator.rates import Rates
from elixir.step_trace import StepTrace, UnitActivations, UnitForward
from elixir.tracer import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.parity import MODES, Case
from tests.common.tracing import CPU, H200, cpu_trace
from tests.unit.search.test_activations import by_name, step_of, wide
from tests.unit.wrapper.test_compiled_layers import compiled, counted, fresh, plan_of, train

settings = pytest.importorskip("torch._functorch.config")
settings_of_dynamo = pytest.importorskip("torch._dynamo.config")

pytestmark = pytest.mark.skipif(not hasattr(settings, "activation_memory_budget"), reason="no memory budgets")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    fresh()
    yield
    fresh()


def names_of(layers: int) -> list[str]:
    return [f"model.layers.{number}" for number in range(layers)]


def with_budgets(budgets: Sequence[float | None]) -> tuple[UnitActivations, ...]:
    """A budget for each layer."""
    return tuple(UnitActivations(name, None, budget=b) for name, b in zip(names_of(len(budgets)), budgets, strict=True))


def under(budget: float) -> Callable[..., Any]:
    """A backend that a user of plain PyTorch could write."""

    def backend(graph: Any, inputs: Any) -> Any:
        with settings.patch(activation_memory_budget=budget):
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return backend


class Drawing(nn.Module):
    """A layer with attention, and dropout after it or in it."""

    def __init__(self, after: float, inside: float) -> None:
        super().__init__()
        self.product, self.after, self.inside = nn.Linear(16, 16), after, inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.product(x).view(2, 4, 4, 4)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.inside)
        return x + nn.functional.dropout(seen.reshape(x.shape), self.after, self.training)


def test_no_more_budgets_are_looked_at_than_decide() -> None:
    it = wide(layers=2)
    whole = cpu_trace(compiled(it.model), it.inp, step_of(it), optimizer="AdamW")
    asked: list[float | None] = []

    def found(*staying: object, unknown: Sequence[float | None] = (), given: bool = False, alone: bool = True) -> Any:
        """The budgets of the traces, the largest first, and whether everything stays with that."""

        def traced(own: tuple[UnitActivations, ...]) -> StepTrace:
            budget = own[0].budget if own else None
            asked.append(budget)
            if budget in unknown:
                raise TraceError("no code")
            return replace(whole, model_name=str(budget))

        asked.clear()
        step = replace(whole, model_name="as set" if given else "uncompiled")
        step = step if alone else replace(step, forwards=(UnitForward(("other",), (), 0, 0),))
        names = set(map(str, staying))
        traces, stays = inside.traces_by_budget(
            step, traced, lambda trace: trace.model_name in names, uncompiled=not given
        )
        return [traces.largest, *traces.under], stays

    assert found("uncompiled", None) == ([None], True)
    assert found("uncompiled") == ([None, 0.99, 0.0], False)
    assert found() == ([0.99, 0.0], False)
    assert asked == [0.99, 0.0]
    assert found(0.99) == ([None, 0.99], False)
    assert found(0.99, None) == ([None, 0.99], True)
    assert asked == [0.99, None]
    assert found(unknown=[0.99]) == ([0.0], False)
    assert found(unknown=[0.0]) == ([0.99], False)
    assert found(None, unknown=[0.99, 0.0]) == ([None], True)
    assert found(unknown=[0.99, 0.0], alone=False) == ([None], False)
    with pytest.raises(InputError, match="less than everything: no code"):
        found(unknown=[0.99, 0.0])
    with pytest.raises(TraceError, match="no code"):
        found("uncompiled", unknown=[None])
    assert found("as set", given=True) == ([None], True)
    assert asked == []
    assert found(0.99, given=True) == ([None, 0.99], False)
    assert asked == [0.99]


@pytest.mark.parametrize("hardware", [CPU, H200])
@pytest.mark.parametrize(("after", "inside"), [(0.5, 0.0), (0.0, 0.5)])
def test_layers_that_draw_have_no_budget(after: float, inside: float, hardware: HardwareProfile) -> None:
    """PyTorch draws other numbers in backward then: its gradients would be wrong."""
    model = nn.Sequential(Drawing(after, inside), Drawing(after, inside))
    own = tuple(UnitActivations(name, None, budget=0.5) for name in ("0", "1"))

    def step(model: nn.Module, batch: dict[str, Any]) -> None:
        model(batch["x"]).sum().backward()

    batch = {"x": torch.randn(2, 4, 16)}
    with pytest.raises(TraceError, match="draws random numbers"):
        trace_step(model, batch, step, hardware=hardware, optimizer=None, compile=True, activations=own)


@pytest.mark.parametrize(("after", "inside"), [(0.5, 0.0), (0.0, 0.5)])
def test_a_run_refuses_a_budget_only_where_gradients_go_through_drawn_numbers(after: float, inside: float) -> None:
    """Also under a plan that was made with the dropout off, or by hand."""
    layer = nn.Sequential(Drawing(after, inside), nn.BatchNorm1d(4))
    model, x = nn.Sequential(layer), torch.randn(2, 4, 16)
    layer.compile(backend="aot_eager")
    own, quiet, counted_once = layer[0], Drawing(0.0, 0.0), layer[1].num_batches_tracked
    applied = Recomputation(model, [UnitActivations("0", None, budget=0.25)])
    for _ in range(2):  # nothing of a refused one is kept
        with pytest.raises(InputError, match=r"draws random numbers.*budget 0\.25.*set its dropout to 0"):
            model(x)
    assert counted_once == 0
    with torch.no_grad():
        model(x)
    assert counted_once == 1
    layer[0] = quiet
    model(x).sum().backward()
    assert quiet.product.weight.grad is not None
    assert counted_once == 2
    if after:  # what is in attention has no mode
        layer[0] = own
        torch.testing.assert_close(model.eval()(x), nn.Sequential(*layer).eval()(x))
    applied.remove()
    layer[0] = own
    model.train()(x).sum().backward()
    assert own.product.weight.grad is not None


def test_an_error_of_a_compiler_under_a_budget_is_as_it_raises_it() -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such operator")

    layer = Drawing(0.0, 0.0)
    layer.compile(backend=fails)
    applied = Recomputation(nn.Sequential(layer), [UnitActivations("0", None, budget=0.25)])
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such operator"):
        layer(torch.randn(2, 4, 16))
    applied.remove()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_layers_with_two_budgets_give_the_bits_of_plain_ones(mode: str) -> None:
    it, budgets = wide(), (0.0, 0.0, 0.3, 0.3)
    plain, backends = copy.deepcopy(it.model), {budget: under(budget) for budget in budgets}
    for layer, budget in zip(plain.model.layers, budgets, strict=True):  # type: ignore[union-attr, arg-type]
        layer.compile(backend=backends[budget])
    wanted = train(it, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    expected = counted()
    fresh()
    compiled(it.model)
    plan = plan_of(it, mode)
    plan = replace(plan, step=replace(plan.step, activations=with_budgets(budgets)))
    assert Plan.from_json(plan.to_json()) == plan
    model = ElixirModule(it.model, plan, device="cpu")
    assert train(it, model, ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))) == wanted
    assert counted()[0] <= expected[0]
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    model.close()


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_a_layer_compiled_anew_gets_its_budget_until_the_model_is_closed(mode: str) -> None:
    it, seen = wide(layers=2), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(settings.activation_memory_budget)
        return graph.forward

    def compile_and_run(model: nn.Module) -> list[float]:
        for layer in it.model.model.layers:  # type: ignore[union-attr]
            layer.compile(backend=backend)
        return run(model)

    def run(model: nn.Module) -> list[float]:
        fresh()
        seen.clear()
        it.loss(model, it.inp).backward()
        return list(seen)

    assert set(compile_and_run(it.model)) == {1.0}
    plan = plan_of(it, mode)
    plan = replace(plan, step=replace(plan.step, activations=with_budgets([0.0, 0.25])))
    it.model.zero_grad()
    model = ElixirModule(it.model, plan, device="cpu")
    assert run(model) == [0.0, 0.25]
    assert compile_and_run(model) == [0.0, 0.25]
    model.zero_grad()
    model.rehome(replace(plan, step=replace(plan.step, activations=with_budgets([0.25, 0.0]))))
    seen.clear()
    it.loss(model, it.inp).backward()
    assert seen == []  # code of the other layer
    model.close()
    assert set(run(it.model)) == {1.0}


@pytest.mark.slow
@pytest.mark.skipif("isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="one limit for all")
def test_budgets_share_no_limit_of_what_a_compiler_makes_of_one_layer() -> None:
    it, seen = wide(layers=2), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(settings.activation_memory_budget)
        return graph.forward

    for layer in it.model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend=backend)
    own = with_budgets([0.0, None])
    with recomputing(it.model, own), settings_of_dynamo.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for tokens in (16, 32):  # of a second size, code is for any
            ids = it.inp["input_ids"][:, :tokens]
            it.loss(it.model, {"input_ids": ids, "labels": ids})
    assert seen == [0.0, 1.0] * 2


def test_passes_of_several_micro_batches_take_layers_of_which_some_are_compiled() -> None:
    it = wide(layers=2)
    it.model.model.layers[0].compile(backend="aot_eager")  # type: ignore[union-attr, index, operator]
    step = StepQuestion(model=it.model, inp=it.inp, step_fn=step_of(it))
    request = SearchRequest(world_size=1, optimizer_type="AdamW", accumulation=2, pass_size=2, activations="auto")
    assert trace_that_keeps(step, CPU, request).step.activations == (UnitActivations("model.layers.1", ()),)
    it.model.model.layers[1].compile(backend="aot_eager")  # type: ignore[union-attr, index, operator]
    with pytest.raises(InputError, match=r"micro-batch by micro-batch \(pass_size=1\)"):
        trace_that_keeps(step, CPU, request)


def of_traces(it: Case, budgets: Sequence[float]) -> BudgetedTraces:
    count = len(it.model.model.layers)  # type: ignore[union-attr, arg-type]

    def traced(*own: float | None) -> StepTrace:
        return cpu_trace(it.model, it.inp, step_of(it), compile=True, activations=with_budgets(own or [None] * count))

    return BudgetedTraces(traced(), {budget: traced(*[budget] * count) for budget in budgets})


def test_a_unit_that_keeps_what_is_set_keeps_it_in_the_run() -> None:
    """It would run again otherwise, by the checkpoint in its own code, which the trace was made without."""
    it = wide("non-reentrant", layers=2)
    step = that_keeps_everything(StepQuestion(model=compiled(it.model), inp=it.inp, step_fn=step_of(it)), it.model)
    whole = step.trace(CPU)
    assert whole.checkpointed_modules == ()
    more = BudgetedTraces(whole, {0.0: whole})  # a compiler that keeps no less
    assert KeptResults(more, Rates(CPU, "float32", 1, 1)).activations(0) == with_budgets([None, None])


def test_levers_choose_budgets_where_the_step_can_be_traced_again(tmp_path: Path) -> None:
    trace = by_name(tmp_path).trace(CPU)
    units = tuple(replace(unit, form="compiled") for unit in trace.units)
    request = SearchRequest(world_size=1)

    def offers(**changes: Any) -> bool:
        step = replace(trace.step, units=units, **changes)
        return CHOOSE_ACTIVATIONS in for_memory(Question(replace(trace, step=step, forwards=()), CPU, request))

    assert offers()
    assert not offers(checkpoint=None)


@pytest.mark.slow
def test_levers_and_stored_traces_know_budgets(tmp_path: Path) -> None:
    whole = by_name(tmp_path, compile=True).trace(CPU)
    budget = int(0.7 * whole.activation_peak_bytes) + 2**20
    options = {"device_memory": budget, "host_budget": "1GiB"}
    with pytest.raises(PlanError) as caught:
        plan_from_trace(whole, CPU, 1, **options)
    (lever,) = (lever for lever in caught.value.levers if lever.options == (("activations", "auto"),))
    assert lever.enough
    plan = plan_from_trace(whole, CPU, 1, activations="auto", **options)
    assert {each.budget for each in plan.activations} & {0.99, 0.0}
    assert plan.predicted.step_s == pytest.approx(lever.step_s, rel=0.01)
    unnamed = replace(whole, step=replace(whole.step, checkpoint=None))
    with pytest.raises(InputError, match="give the model, not the trace"):
        plan_from_trace(unnamed, CPU, 1, activations="auto", **options)


@pytest.mark.slow
def test_a_mixture_is_predicted_as_it_is_traced() -> None:
    it, budgets = wide(), (0.5, 0.0, None, 0.5)
    traces = of_traces(it, (0.5, 0.0))
    own = with_budgets(budgets)
    mixed, traced = traces.mixed(own), cpu_trace(it.model, it.inp, step_of(it), compile=True, activations=own)
    assert mixed.flops == traced.flops
    assert [access.live_bytes for access in mixed.accesses] == [access.live_bytes for access in traced.accesses]
    assert [access.kept_bytes for access in mixed.accesses] == [access.kept_bytes for access in traced.accesses]
    own = with_budgets((0.5, 0.0, 0.5, 0.0))
    without_what_is_set = BudgetedTraces(traces.under[0.5], {0.0: traces.under[0.0]}, 0.5)
    assert without_what_is_set.mixed(own).accesses == without_what_is_set.mixed(own[1::2]).accesses
    mixed, other = without_what_is_set.mixed(own), traces.mixed(own)
    assert [access.live_bytes for access in mixed.accesses] == [access.live_bytes for access in other.accesses]
    assert mixed.flops == other.flops


@pytest.mark.slow
def test_each_change_keeps_more_and_takes_less_time() -> None:
    rates = Rates(CPU, "float32", 1, 1)
    kept = KeptResults(of_traces(wide(), (0.5, 0.0)), rates)
    fillings = [kept.filled(count) for count in range(len(kept.changes) + 1)]
    peaks = [max(access.live_bytes for access in each.accesses) for each in fillings]
    assert peaks[1:] == sorted(peaks[1:])  # the last layer computes again in less than it would keep
    assert peaks[0] < 0.5 * peaks[-1]
    seconds = [float(rates.accesses_s(each).sum()) for each in fillings]
    assert [seconds[0] - each for each in seconds] == pytest.approx(kept.saved_s, rel=0.01, abs=1e-7)


def test_units_have_a_budget_if_they_are_as_fast_with_it_and_keep_less() -> None:
    it = wide(layers=2)
    whole = cpu_trace(compiled(it.model), it.inp, step_of(it), optimizer="AdamW")

    def keeping_less(nbytes: int, times: int) -> StepTrace:
        """The step with other bytes kept of each unit, whose backward has more to do."""
        accesses = list(whole.accesses)
        for forward, backward in budgeted_units(whole).values():
            for index in range(forward.last + 1, backward.first):
                had = accesses[index]
                accesses[index] = replace(had, live_bytes=had.live_bytes - nbytes, kept_bytes=had.kept_bytes - nbytes)
            last = accesses[backward.first]
            accesses[backward.first] = replace(last, operations=last.operations * times)
        return replace(whole, accesses=tuple(accesses))

    traces = BudgetedTraces(whole, {0.99: keeping_less(2**16, 1), 0.0: keeping_less(2**17, 2)})
    request = SearchRequest(world_size=1, optimizer_type="AdamW", device_memory="1GiB", host_budget="1GiB")
    rates = Rates(CPU, "float32", 1, 1)
    kept = KeptResults(traces, rates)
    assert kept.activations(0) == with_budgets([0.0, 0.0])
    own = inside.activations_that_fit_best(kept, rates, CPU, request)
    assert own == with_budgets([0.99, 0.99])  # more than all of these fits


@pytest.mark.slow
def test_the_chosen_step_fits_and_its_peak_is_that_of_a_real_one() -> None:
    it = wide()
    whole, least = (of_traces(it, (0.0,)).get(budget).activation_peak_bytes for budget in (None, 0.0))
    budget = (whole + least) // 2 + 2**20
    options: dict[str, Any] = {"inp": it.inp, "step_fn": step_of(it), "hardware": "cpu", "activations": "auto"}
    options |= {"device_memory": budget, "host_budget": "1GiB", "optimizer_type": "AdamW"}
    compiled(it.model, "inductor")
    answer = optimal_search(it.model, 1, **options)
    plan, trace = answer.plan, answer.trace
    assert {each.unit for each in plan.activations} == set(names_of(4))
    assert len({each.budget for each in plan.activations}) > 1
    assert plan.predicted.device_peak_bytes <= budget
    with recomputing(it.model, plan.activations):
        for _ in range(2):
            step_of(it)(it.model, it.inp)
            it.model.zero_grad()
        real = observe_step(it.model, it.inp, step_of(it)).peak_bytes
    assert trace.backward_peak_bytes - trace.resting_bytes == pytest.approx(real, rel=0.002)


@pytest.mark.slow
def test_for_a_gpu_budgets_are_chosen_unless_everything_fits() -> None:
    it = wide()
    ids = torch.arange(16 * 96).reshape(16, 96) % 50
    options: dict[str, Any] = {"inp": {"input_ids": ids, "labels": ids}, "step_fn": step_of(it), "hardware": "h100"}
    options |= {"unified_dtype": "bf16", "host_budget": "2GiB", "optimizer_type": "AdamW", "activations": "auto"}
    compiled(it.model, "inductor")
    assert optimal_search(it.model, 1, **options, device_memory="84MiB").plan.activations == ()
    plan = optimal_search(it.model, 1, **options, device_memory="70MiB").plan  # of which 64 are cuBLAS workspaces
    assert plan.activations == with_budgets([0.0] * 4)
    assert plan.predicted.device_peak_bytes <= 70 * 2**20


def test_what_is_refused() -> None:
    it = wide(layers=2)
    own = with_budgets((0.0, 0.0))
    for layer in it.model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")
    with pytest.raises(TraceError, match="only of layers that inductor compiles"):
        trace_step(it.model, it.inp, step_of(it), hardware=preset("h100"), activations=own)
    options: dict[str, Any] = {"inp": it.inp, "step_fn": step_of(it), "hardware": "cpu", "activations": "auto"}
    compiled(it.model)
    assert optimal_search(it.model, 1, **options, device_memory="1GiB").plan.activations == ()
    with pytest.raises(InputError, match=r"less than everything: .* only of layers that inductor compiles; "):
        optimal_search(it.model, 1, **options, device_memory="3MiB", host_budget="1GiB")
    with pytest.raises(InputError, match="is not compiled, but its plan"):
        Recomputation(wide().model, own)
    nobody = nn.Module()
    nobody.model = nn.Module()
    nobody.model.layers = nn.ModuleList([nn.Linear(2, 2)])
    nobody.model.layers[0]._compiled_call_impl = lambda *args: args
    with pytest.raises(InputError, match="in an unknown way"):
        Recomputation(nobody, own[:1])
