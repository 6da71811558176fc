"""Units that move activations to the host, as a search predicts them and as it chooses them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from elixir.hardware.profile import preset
from elixir.search import optimal_search
from elixir.search.problem.activation_trace import FIRST_INPUT, WHOLE, StepUnits, kept_trace, swapped_trace
from elixir.step_trace import StepShape, StepTrace, UnitActivations
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import Case
from tests.common.tracing import cpu_trace
from tests.unit.search.test_activations import step_of, wide
from tests.unit.wrapper.test_compiled_layers import train

TURNS = {
    "inputs": (((), FIRST_INPUT),),
    "whole": ((None, WHOLE),),
    "by turns": ((None, WHOLE), ((), FIRST_INPUT), (None, ())),
}


def longer() -> Case:
    it = wide(layers=6)
    ids = torch.arange(4 * 64).reshape(4, 64) % 50
    return replace(it, inp={"input_ids": ids.repeat(1, 2), "labels": ids.repeat(1, 2)})


def predicted_and_traced(turns: str, it: Case) -> tuple[StepTrace, StepTrace]:
    whole = cpu_trace(it.model, it.inp, step_of(it))
    step, own = StepUnits(whole), []
    for number, unit in enumerate(whole.units):
        keep, swap = TURNS[turns][number % len(TURNS[turns])]
        own.append(UnitActivations(unit.name, keep, swap if step.able(unit.name) else ()))
    mine = swapped_trace(kept_trace(whole, own), step)
    return mine, cpu_trace(it.model, it.inp, step_of(it), shape=StepShape(activations=tuple(own)))


@pytest.mark.parametrize("turns", TURNS)
def test_a_choice_is_predicted_as_it_is_traced(turns: str) -> None:
    agree(*predicted_and_traced(turns, longer()))


def agree(mine: StepTrace, traced: StepTrace) -> None:
    assert traced.step.swap_bytes > 0
    assert mine.step.swap_bytes == pytest.approx(traced.step.swap_bytes, rel=0.03)
    assert len(mine.accesses) == len(traced.accesses)
    peaks = [max(access.live_bytes for access in each.accesses) for each in (mine, traced)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.03)
    ends = [
        {(each.direction, each.ends) for each in trace.transfers if each.nbytes >= 2**16} for trace in (mine, traced)
    ]
    late = {(direction, at) for direction, at in ends[0] if not any(abs(at - other) <= 2 for _, other in ends[1])}
    assert not late


def test_the_search_moves_what_pays_and_a_run_has_the_same_bits() -> None:
    it = longer()
    plain = copy.deepcopy(it.model)
    whole = cpu_trace(it.model, it.inp, step_of(it))
    hardware = replace(
        preset("cpu"), host_to_device_bytes_per_s=1e12, device_to_host_bytes_per_s=1e12, host_memory_bytes_per_s=4e12
    )
    options = {"inp": it.inp, "step_fn": step_of(it), "hardware": hardware, "optimizer_type": "AdamW"}
    options |= {"device_memory": whole.activation_peak_bytes // 2 + 2**20, "assume": "nominal", "activations": "auto"}
    kept, moved = (optimal_search(it.model, 1, host_budget=host, **options).plan for host in ("6MiB", "1GiB"))
    assert moved.step.swap_bytes > kept.step.swap_bytes
    assert moved.predicted.step_s < kept.predicted.step_s
    assert moved.predicted.host_parts["swapped_activations"] == moved.step.swap_bytes
    assert "on the host meanwhile" in str(moved)
    wanted = train(it, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    model = ElixirModule(it.model, moved, device="cpu")
    assert train(it, model, ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))) == wanted
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    report = model.last_report
    assert report is not None
    assert report.observed["device_to_host"] == report.predicted["device_to_host"]
    assert report.observed["host_to_device"] == report.predicted["host_to_device"]
    model.close()
