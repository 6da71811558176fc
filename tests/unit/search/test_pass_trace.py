"""The trace of a pass, and plans that are made from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

from elixir.access import activations as swapping
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.plan.plan import Plan
from elixir.search.planner import plan_or_shortage, simple_plan
from elixir.search.problem import activation_trace
from elixir.search.problem.activation_trace import FIRST_INPUT, movable_inputs, with_inputs_on_host
from elixir.search.problem.coarse_trace import pass_trace
from elixir.search.question import Question
from elixir.search.request import SearchRequest
from elixir.search.searches import profile_for
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepShape, StepTrace, UnitActivations
from elixir.tracer.trace import trace_step
from tests.common.one_pass import Stack, batches, family, hf_loss, square_loss, vectors


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    made, batch = family("llama")(), batches("llama", 1)[0][0]
    return trace_step(made, batch, lambda m, b: hf_loss(m, b).backward(), hardware=profile_for("cpu"))


def test_layers_come_in_the_order_of_forward(trace: StepTrace) -> None:
    assert trace.step.checkpointed == tuple(f"model.layers.{index}" for index in range(3))


def test_each_layer_is_one_access_per_direction(trace: StepTrace) -> None:
    found = pass_trace(trace, 4)
    modules = [(access.phase, access.module) for access in found.accesses]
    layers = [f"model.layers.{index}" for index in range(3)]
    assert [module for phase, module in modules if phase == "forward" and module] == layers
    assert [module for phase, module in modules if phase == "backward" and module] == layers[::-1]
    turn = next(index for index, access in enumerate(found.accesses) if access.phase == "backward")
    # The tail alternates between forward and backward, so its weights are needed together.
    tail = found.accesses[turn - 1 : turn + 1]
    assert tail[0].parameters == tail[1].parameters
    # The others wait with what the last layer has given, or with its gradient, and never with logits.
    more = pass_trace(trace, 5).accesses[turn - 1 : turn + 1]
    waiting = max(tail[0].kept_bytes, found.accesses[turn + 1].kept_bytes) // 4
    assert [after.live_bytes - before.live_bytes for before, after in zip(tail, more, strict=True)] == [waiting] * 2
    assert waiting < tail[1].kept_bytes // 4


def test_work_grows_with_the_pass_and_the_order_does_not(trace: StepTrace) -> None:
    passes = {size: pass_trace(trace, size) for size in (2, 4, 16)}
    orders = [[(a.phase, a.parameters, a.pin_until) for a in found.accesses] for found in passes.values()]
    assert orders[0] == orders[1] == orders[2]
    for size, found in passes.items():
        assert found.flops == size * trace.flops
        assert found.input_bytes == size * trace.input_bytes
        assert {info.grad_access is None for info in found.parameters} == {False}


def test_memory_grows_by_what_each_layer_keeps(trace: StepTrace) -> None:
    highest = [max(access.live_bytes for access in pass_trace(trace, size).accesses) for size in (2, 3, 4)]
    assert highest[1] - highest[0] == highest[2] - highest[1] > 0


def test_a_trace_of_a_pass_is_taken_as_it_is_and_goes_through_json(trace: StepTrace) -> None:
    found = pass_trace(trace, 4)
    assert pass_trace(found, 4) is found
    assert StepTrace.from_json(found.to_json()) == replace(found, trace_s=found.trace_s)
    with pytest.raises(InputError, match="of 4 micro-batches in a pass"):
        pass_trace(found, 2)


@pytest.fixture(scope="module")
def deep() -> StepTrace:
    made = family("llama", layers=8, hidden=128)()
    batch = {name: value[:1, :8] for name, value in batches("llama", 1)[0][0].items()}
    return trace_step(made, batch, lambda m, b: hf_loss(m, b).backward(), hardware=slow_link())


def slow_link() -> HardwareProfile:
    """A machine on whose link the weights take longer than a micro-batch computes."""
    return replace(preset("rtx4090"), host_to_device_bytes_per_s=1e8, device_to_host_bytes_per_s=1e8)


def planned(trace: StepTrace, size: int | Literal["auto"], device_memory: str = "23MiB") -> Plan:
    request = SearchRequest(
        world_size=1,
        accumulation=8,
        pass_size=size,
        device_memory=device_memory,
        host_budget="64GiB",
        assume="nominal",
        placement="cpu" if size != "auto" or device_memory == "23MiB" else "auto",
    )
    return plan_or_shortage(Question(trace, slow_link(), request))


def test_a_plan_knows_its_passes_and_simulates_as_predicted(deep: StepTrace) -> None:
    one, joined = planned(deep, 1), planned(deep, 8)
    assert (one.passes, joined.passes, one.accumulation, joined.accumulation) == (8, 1, 8, 8)
    assert joined.step.checkpointed == tuple(f"model.layers.{index}" for index in range(8))
    assert Plan.from_json(joined.to_json()) == joined
    assert joined.predicted.moved_bytes["device_to_host"] * 8 == one.predicted.moved_bytes["device_to_host"]
    assert joined.predicted.moved_bytes["host_to_device"] * 4 < one.predicted.moved_bytes["host_to_device"]
    assert joined.predicted.flops == one.predicted.flops
    assert joined.predicted.step_s < one.predicted.step_s
    assert simulate_step(joined, deep, slow_link()).step_s == pytest.approx(joined.predicted.step_s, rel=1e-6)


def test_auto_takes_the_smallest_pass_among_the_fastest(deep: StepTrace) -> None:
    best = planned(deep, "auto")
    seconds = {size: planned(deep, size).predicted.step_s for size in (1, 2, 4, 8)}
    assert best.pass_size == min(size for size, step_s in seconds.items() if step_s <= 1.01 * min(seconds.values())) > 1


@pytest.fixture
def small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has tensors of tiny models be worth a copy."""
    for module in (swapping, activation_trace):
        monkeypatch.setattr(module, "SMALLEST_BYTES", 256)


@pytest.mark.usefixtures("small_inputs")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_inputs_on_the_host_are_predicted_as_they_are_traced(name: str) -> None:
    made, batch = family(name, layers=4, hidden=128)(), batches(name, 1)[0][0]

    def traced(*activations: UnitActivations) -> StepTrace:
        return trace_step(
            made,
            batch,
            lambda m, b: hf_loss(m, b).backward(),
            hardware=profile_for("cpu"),
            shape=StepShape(activations=activations),
        )

    plain = traced()
    units = movable_inputs(plain)
    assert units
    assert set(units) <= {unit.name for unit in plain.units[1:-1]}
    mine = with_inputs_on_host(plain, units)
    real = traced(*(UnitActivations(name, (), FIRST_INPUT) for name in units))
    assert len(mine.accesses) == len(real.accesses)
    for size in (2, 4, 16):
        found, expected = pass_trace(mine, size), pass_trace(real, size)
        states = size * len(units) * torch.get_rng_state().nbytes  # of generators, which count as inputs
        assert highest(found) <= highest(expected) <= highest(found) + states
        assert highest(found) < highest(pass_trace(plain, size))
        ends = [[(each.direction, each.begins, each.ends) for each in it.transfers] for it in (found, expected)]
        assert sorted(ends[0]) == sorted(ends[1])


def highest(trace: StepTrace) -> int:
    return max(access.live_bytes for access in trace.accesses)


@pytest.mark.usefixtures("small_inputs")
def test_auto_moves_inputs_to_the_host_where_passes_need_the_room() -> None:
    made, batch = family("llama", layers=5, hidden=128)(), batches("llama", 1)[0][0]
    step = trace_step(made, batch, lambda m, b: hf_loss(m, b).backward(), hardware=slow_link())
    request = SearchRequest(
        world_size=1, accumulation=8, pass_size="auto", device_memory="20MiB", host_budget="64GiB", assume="nominal"
    )
    found = plan_or_shortage(Question(step, slow_link(), request))
    without = plan_or_shortage(Question(step, slow_link(), request), moves=False)
    assert found.step.swap_bytes > 0 == without.step.swap_bytes
    assert found.predicted.step_s < without.predicted.step_s / 1.01
    assert found.predicted.host_parts["swapped_activations"] == found.step.swap_bytes
    assert simulate_step(found, step, slow_link()).step_s == pytest.approx(found.predicted.step_s, rel=1e-6)
    assert plan_or_shortage(Question(step, slow_link(), replace(request, device_memory="1GiB"))).step.swap_bytes == 0


class Counting(Stack):
    """Counts its forwards in a buffer of a layer."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__([nn.Linear(8, 8) for _ in range(3)])
        self.counts = counts
        self.layers[1].register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.layers[1].forwards += 1
        return super().forward(x)


def test_a_model_that_counts_in_a_buffer_gets_no_passes() -> None:
    def traced(*, counts: bool) -> StepTrace:
        made, batch = Counting(counts=counts), vectors(1)[0][0]
        return trace_step(made, batch, lambda m, b: square_loss(m, b).backward(), hardware=slow_link())

    stateless, counting = (traced(counts=counts) for counts in (False, True))
    assert counting.step == replace(stateless.step, changed_state="layers.1.forwards")
    assert StepTrace.from_json(counting.to_json()) == counting
    assert "changed_state" not in stateless.to_json()  # as in files of versions that did not look for it
    assert StepTrace.from_json(stateless.to_json()) == stateless

    request = SearchRequest(world_size=1, accumulation=8, pass_size="auto", placement="cpu", host_budget="1GiB")
    assert plan_or_shortage(Question(stateless, slow_link(), request)).pass_size > 1
    assert plan_or_shortage(Question(counting, slow_link(), request)).pass_size == 1
    with pytest.raises(InputError, match="^layers.1 keeps 'forwards' from one forward .* plan with pass_size=1"):
        plan_or_shortage(Question(counting, slow_link(), replace(request, pass_size=2)))


@pytest.mark.parametrize(("accumulation", "sizes"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 12)), (7, (1, 7))])
def test_auto_tries_powers_of_two_and_all_together(accumulation: int, sizes: tuple[int, ...]) -> None:
    assert SearchRequest(world_size=1, accumulation=accumulation, pass_size="auto").sizes == sizes


def test_auto_keeps_single_micro_batches_where_nothing_moves(deep: StepTrace) -> None:
    assert planned(deep, "auto", "1GiB").pass_size == 1


@pytest.mark.parametrize("size", [1, 4])
def test_matrices_are_those_of_one_micro_batch(trace: StepTrace, size: int) -> None:
    request = SearchRequest(
        world_size=1, optimizer_type="Muon + AdamW", host_budget="64GiB", accumulation=4, pass_size=size
    )
    found = simple_plan(trace, profile_for("cpu"), request).matrices
    assert "model.layers.0.mlp.up_proj.weight" in found
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(found)
