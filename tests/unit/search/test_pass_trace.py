"""The trace of a pass, and plans that are made from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.plan.plan import Plan
from elixir.search.planner import plan_or_shortage
from elixir.search.problem.coarse_trace import pass_trace
from elixir.search.question import Question
from elixir.search.request import SearchRequest
from elixir.search.searches import profile_for
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from tests.common.one_pass import batches, family, hf_loss


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    made, batch = family("llama")(), batches("llama", 1)[0][0]
    return trace_step(made, batch, lambda m, b: hf_loss(m, b).backward(), hardware=profile_for("cpu"))


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


def test_auto_takes_the_smallest_pass_among_the_fastest(deep: StepTrace) -> None:
    best = planned(deep, "auto")
    seconds = {size: planned(deep, size).predicted.step_s for size in (1, 2, 4, 8)}
    assert best.pass_size == min(size for size, step_s in seconds.items() if step_s <= 1.01 * min(seconds.values())) > 1
