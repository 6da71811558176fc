"""Choices of what units keep of their activations: the step as it is predicted for one, and the choice itself."""

from __future__ import annotations

import copy
import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import LlamaConfig

from elixir.cli import main
from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.plan.plan import Plan
from elixir.plan.prediction import Prediction
from elixir.search import optimal_search, plan_from_trace, search_batches, simple_search
from elixir.search.problem.activation_trace import kept_trace
from elixir.search.propose.activation_choices import KeptResults
from elixir.search.question import StepQuestion
from elixir.search.simulator.rates import Rates
from elixir.show import tables
from elixir.show.plan_map import plot_plan
from elixir.step_trace import Result, StepShape, StepTrace, UnitActivations
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import Case, case
from tests.common.tracing import CPU, cpu_trace, sum_step
from tests.unit.wrapper.test_compiled_layers import train
from tests.unit.wrapper.test_units_as_one import INP, Layer, RunsAPartAgain, Stack


def wide(checkpoint: str = "none", layers: int = 4) -> Case:
    """A model whose activations outweigh the rest, as long sequences make them."""
    it = case("llama", checkpoint, hidden_size=64, intermediate_size=176, num_hidden_layers=layers)
    ids = torch.arange(4 * 96).reshape(4, 96) % 50
    return replace(it, inp={"input_ids": ids, "labels": ids})


def calling(it: Case, calls: str) -> Case:
    """The case with a loss that calls the model two or three times."""

    def both(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
        flipped = {name: value.flip(1) for name, value in inp.items()}
        return it.loss(model, inp) + it.loss(model, flipped)

    def with_references(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            before = it.loss(model, inp)
        loss = it.loss(model, inp)
        with torch.no_grad():
            after = it.loss(model, inp)
        return (loss - before + 1).square() + after

    return replace(it, loss={"both": both, "with references": with_references}[calls])


def step_of(it: Case) -> Any:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    return step


def kept_of(trace: StepTrace) -> KeptResults:
    return KeptResults(trace, Rates(CPU, "float32", 1, 1))


@pytest.mark.parametrize("share", [0.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.01), (torch.bfloat16, 0.03)])
def test_a_choice_is_predicted_as_it_is_traced(dtype: torch.dtype, tolerance: float, share: float) -> None:
    """In bfloat16, whose norms save a copy in float32, a layer that keeps everything lets go of its input."""
    it = wide()
    it.model.to(dtype)
    whole = cpu_trace(it.model, it.inp, step_of(it))
    kept = kept_of(whole)
    count = int(share * len(kept.changes))
    mine, traced = (
        kept.filled(count),
        cpu_trace(it.model, it.inp, step_of(it), shape=StepShape(activations=kept.activations(count))),
    )
    assert mine.units == traced.units
    assert mine.flops == traced.flops
    assert len(mine.accesses) == len(traced.accesses)
    assert [info.grad_access for info in mine.parameters] == [info.grad_access for info in traced.parameters]
    peaks = [max(access.live_bytes for access in each.accesses) for each in (mine, traced)]
    assert peaks[0] == pytest.approx(peaks[1], rel=tolerance)


def assert_same_bits(it: Case, plain: nn.Module, plan: Plan) -> None:
    """Trains a case under a plan as its copy in plain PyTorch."""
    wanted = train(it, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    model = ElixirModule(it.model, plan, device="cpu")
    assert train(it, model, ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))) == wanted
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    model.close()


def test_each_change_keeps_more_and_takes_less_time() -> None:
    it = wide()
    kept = kept_of(cpu_trace(it.model, it.inp, step_of(it)))
    seconds = Rates(CPU, "float32", 1, 1)
    peaks = [max(access.live_bytes for access in kept.filled(count).accesses) for count in range(len(kept.changes) + 1)]
    assert peaks == sorted(peaks)
    compute = [float(seconds.accesses_s(kept.filled(count)).sum()) for count in range(len(kept.changes) + 1)]
    assert compute == sorted(compute, reverse=True)
    saved_s = list(itertools.accumulate((change.saved_s for change in kept.changes), initial=0.0))
    assert [compute[0] - each for each in compute] == pytest.approx(saved_s, rel=0.05, abs=1e-6)
    worth = [change.saved_s for change in kept.changes]
    assert min(worth) > 0


@pytest.mark.sampled
@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant"])
def test_the_chosen_step_fits_runs_faster_and_gives_the_same_bits(checkpoint: str) -> None:
    it = wide(checkpoint)
    plain = copy.deepcopy(it.model)
    whole, again = (cpu_trace(wide(form).model, it.inp, step_of(it)) for form in ("none", "non-reentrant"))
    between = (whole.activation_peak_bytes + again.activation_peak_bytes) // 2 + 2**20
    options = {"inp": it.inp, "step_fn": step_of(it), "hardware": "cpu", "device_memory": between}
    options |= {"host_budget": "1GiB", "optimizer_type": "AdamW", "assume": "nominal"}
    plan = optimal_search(it.model, 1, activations="auto", **options).plan
    assert {each.unit for each in plan.activations} == {f"model.layers.{number}" for number in range(4)}
    assert plan.predicted.device_peak_bytes <= between
    every = optimal_search(wide("non-reentrant").model, 1, **options).plan
    assert plan.predicted.step_s < every.predicted.step_s
    assert_same_bits(it, plain, plan)


def test_a_little_room_next_to_resident_weights_is_used() -> None:
    """All weights are on the device, so what is left there is far less than it were next to weights on the host."""

    def planned(checkpoint: str, **more: Any) -> Prediction:
        it = wide(checkpoint, layers=8)
        options: dict[str, Any] = {"inp": it.inp, "step_fn": step_of(it), "hardware": "cpu", "assume": "nominal"}
        options |= {"host_budget": "1GiB", "optimizer_type": "AdamW", "placement": "cuda"}
        return optimal_search(it.model, 1, **options, **more).plan.predicted

    again, whole = (planned(checkpoint, device_memory="1GiB") for checkpoint in ("non-reentrant", "none"))
    room = again.device_peak_bytes + (whole.device_peak_bytes - again.device_peak_bytes) // 30
    chosen = planned("none", device_memory=room, activations="auto")
    assert again.device_peak_bytes < chosen.device_peak_bytes <= room
    assert chosen.step_s < again.step_s


def by_name(folder: Path, **options: Any) -> StepQuestion:
    """A step of two layers that follows from the name of its model."""
    small = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    LlamaConfig(**small, num_attention_heads=2).save_pretrained(folder)
    return StepQuestion(model=str(folder), batch=4, seq=96, **options)


def test_the_table_and_the_picture_show_what_units_keep() -> None:
    keep = (Result("aten.mm.default", 0), Result("aten._scaled_dot_product_flash_attention_for_cpu.default", 0))
    units = tuple(UnitActivations(f"layers.{n}", keep if n < 2 else None) for n in range(3))
    trace = cpu_trace(Stack(), INP, sum_step, shape=StepShape(activations=units))
    plan = plan_from_trace(trace, CPU, 1, device_memory="1GiB", host_budget="1GiB").plan
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables.activations_table(plan))
    text = " ".join(console.export_text().split())
    assert "layers.0 to 1 (2) mm, attention nothing layers.2 everything nothing" in text
    assert "2 units keep mm, attention and make the rest again, 1 unit keeps everything" in str(plan)
    labels = [text.get_text() for axes in plot_plan(plan).axes for text in axes.get_legend().get_texts()]
    assert {"keep mm, attention", "keep everything"} <= set(labels)


class Draws(Layer):
    """Drops elements out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.dropout(self.up(x), 0.5, True))


def test_what_is_refused() -> None:
    def search(model: nn.Module, **options: Any) -> object:
        return optimal_search(model, 1, inp=INP, hardware="cpu", activations="auto", **{"step_fn": sum_step} | options)

    for options, why in (({"optimizer_type": None}, "for training"),):
        with pytest.raises(InputError, match=why):
            search(Stack(), **options)
    with pytest.raises(InputError, match="by a checkpoint in the model's code"):
        search(Stack(RunsAPartAgain))
    with pytest.raises(InputError, match="repeats no layer"):
        search(nn.Linear(4, 4), step_fn=lambda model, inp: model(inp["x"]).sum().backward())
    with pytest.raises(InputError, match="'layers.0', can run again: .* several times in a step with other sizes"):
        search(Stack(), step_fn=lambda model, inp: (model(inp["x"]).sum() + model(inp["x"][:1]).sum()).backward())
    with pytest.raises(InputError, match="not the trace"):
        optimal_search(cpu_trace(Stack(), INP, sum_step), 1, hardware="cpu", activations="auto")
    with pytest.raises(InputError, match="by hand"):
        simple_search(Stack(), 1, inp=INP, step_fn=sum_step, hardware="cpu", activations="auto")
    trace = cpu_trace(Stack(), INP, sum_step)
    with pytest.raises(InputError, match="needs the model"):
        search_batches(lambda batch, form: trace, preset("cpu"), 1, samples=1, activations="auto")
    with pytest.raises(InputError, match="trace the model again"):
        kept_trace(trace, [UnitActivations("begin", (Result("aten.mm.default", 0),))])


def test_a_machine_that_has_no_room_for_all_results_keeps_fewer() -> None:
    """On a CPU all of the machine's memory may be the device's or the host's, but not both."""
    step = ["opt-125m", "--hardware", "cpu", "--host-memory", "3.7GiB", "--batch", "4", "--seq", "512"]
    assert main(["plan", *step, "--activations", "auto", "--no-levers", "--brief"]) == 0
