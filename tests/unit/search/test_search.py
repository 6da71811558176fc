"""Plans fit what they were given, say what they need to the byte, and are no slower than the first Elixir's would be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.original_rule import OriginalRule
from elixir.errors import PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.optimizer_states import StateSize, moments_size
from elixir.plan.chunk_plan import Home
from elixir.search.planner import PREFETCH_DEPTH
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.packed_step import PackedStep, StepFacts
from elixir.search.problem.packing import ParamTable
from elixir.search.problem.placement import Placement, Setting
from elixir.search.propose.sizes import SearchSpace
from elixir.step_trace import StepTrace
from elixir.units import GIB, MIB
from tests.common.searching import (
    HARDWARE,
    SMALL,
    check_consistent,
    least_needed,
    plan,
    shortage,
    traces,
)
from tests.common.synthetic_trace import TraceBuilder, stack_trace

NANOSECOND_S = 1e-9


@pytest.mark.slow
@given(
    traces(),
    st.sampled_from([1, 1, 2, 3, 12]),
    st.sampled_from([0, 3, 10, 25, 50, 75, 100]),
    st.booleans(),
    st.sampled_from([("Adam", "float32"), ("SGD", "float32"), ("AdamW", "bfloat16"), ("Adam", "8bit")]),
)
@settings(max_examples=12, deadline=None)
def test_plans_fit_say_what_they_need_and_are_no_slower_than_the_originals(
    trace: StepTrace, world_size: int, percent: int, overlap: bool, optimizer: tuple[str, str]
) -> None:
    options: dict[str, Any] = {"overlap": overlap, "optimizer_type": optimizer[0], "moments": optimizer[1]}
    least = least_needed(trace, world_size, **options)
    most = plan(trace, world_size, placement="cuda", **options).predicted.device_peak_bytes
    device = least + max(most - least, 0) * percent // 100
    made = plan(trace, world_size, device=device, **options)
    assert made.state_size == (StateSize(4) if optimizer[0] == "SGD" else moments_size(optimizer[1]))
    check_consistent(made, trace)
    ranks_per_host = HARDWARE.ranks_per_host(world_size)
    setting = Setting(world_size, ranks_per_host, made.state_size, overlap, moments=made.moments)
    theirs = originals_step_s(trace, setting, device)
    assert theirs is None or made.predicted.seconds["total"] <= theirs + NANOSECOND_S


@pytest.mark.slow
@given(traces(), st.sampled_from([1, 4]))
@settings(max_examples=8, deadline=None)
def test_what_an_error_says_is_needed_is_exactly_enough(trace: StepTrace, world_size: int) -> None:
    least = least_needed(trace, world_size)
    made = plan(trace, world_size, device=least)
    assert made.predicted.device_peak_bytes <= least
    with pytest.raises(PlanError) as caught:
        plan(trace, world_size, device=least - 1)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (least, least - 1)
    if made.predicted.host_step_bytes:
        with pytest.raises(PlanError, match="host memory") as short:
            plan(trace, world_size, device=least, host=0)
        enough = short.value.needed_bytes
        assert plan(trace, world_size, device=least, host=enough).predicted.host_peak_bytes <= enough


def test_the_least_host_memory_is_searched_for_where_all_memory_together_is_too_little() -> None:
    build = TraceBuilder()
    weights = [build.parameter(f"w{i}", mib * MIB) for i, mib in enumerate((8, 24, 2, 3))]
    for phase, order in (("forward", weights), ("backward", weights[::-1])):
        for index in order:
            build.use(phase, index, flops=10**9, live=8 * MIB)
    trace = build.build("uneven")
    device = least_needed(trace, 1, overlap=False) + 50 * MIB
    enough = {}
    for host in (0, 400 * MIB):  # with the first, some weight or state would lie nowhere
        options = {"device_memory": device, "host_budget": host, "overlap": False}
        enough[host] = shortage(trace, HARDWARE, 1, **options).needed_bytes
    assert enough[0] == enough[400 * MIB]
    assert plan(trace, device=device, host=enough[0], overlap=False).predicted.host_step_bytes == enough[0]
    less = shortage(trace, HARDWARE, 1, device_memory=device, host_budget=enough[0] - 1, overlap=False)
    assert less.needed_bytes == enough[0]


def test_a_chunk_that_moves_gives_back_its_gradient_block() -> None:
    build = TraceBuilder()
    weights = [build.parameter(f"w{i}", 2**20) for i in range(4)]
    for index in weights:
        build.use("forward", index)
    # Two pairs of gradients, each pair at once: two blocks, until one of either pair stays on the device.
    build.use("backward", *weights[2:])
    build.use("backward", *weights[:2])
    trace = build.build("pairs")
    table = ParamTable(trace, 1)
    model = MemoryModel(
        PackedStep(StepFacts(trace), table.pack(table.largest_bytes)), Setting(1, 1, StateSize(8), False)
    )
    homes = [Home.HOST] * 4
    for chunk, grad_blocks in ((0, 2), (2, 1), (1, 1), (3, 0)):
        homes[chunk] = Home.RESIDENT
        assert model.need(Placement(tuple(homes)), 0).grad_blocks == grad_blocks


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), [("opt-1.3b", 1), ("opt-13b", 4), ("gpt2-4b", 2), ("gpt2-20b", 1)])
def test_plans_of_known_models_are_no_slower_than_the_originals(name: str, world_size: int) -> None:
    trace = stack_trace(name)
    setting = Setting(world_size, world_size, StateSize(8), True)
    for gib in (12, 60):
        theirs = originals_step_s(trace, setting, gib * GIB)
        if theirs is not None:
            made = plan(trace, world_size, device=gib * GIB)
            assert made.predicted.seconds["total"] <= theirs + NANOSECOND_S


def originals_step_s(
    trace: StepTrace, setting: Setting, device_bytes: int, hardware: HardwareProfile = HARDWARE
) -> float | None:
    """Simulated seconds of what the first Elixir would have chosen."""
    choice = OriginalRule(trace, setting).choose(device_bytes)
    if choice is None:
        return None
    space = SearchSpace(trace, hardware, setting)
    return choice.candidate(space, PREFETCH_DEPTH if setting.overlap else 0).seconds["total"]


def test_bytes_of_a_plan_that_streams_everything() -> None:
    trace = stack_trace(SMALL)
    made = plan(trace, 2, placement="cpu", overlap=False, early_updates=False)
    whole = sum(chunk.weight_bytes for chunk in made.chunks)
    numel = sum(chunk.numel for chunk in made.chunks)
    # Both ranks share the machine: bf16 weights and gradients, fp32 master and two moments.
    assert made.predicted.host_parts == {
        "weights": whole,
        "optimizer_states": 12 * numel,
        "gradients": whole,
        "checkpoint": 2 * 12 * max(chunk.numel for chunk in made.chunks),
    }
    parts = made.predicted.device_parts
    assert parts["rcache"] == made.block_count * made.block_bytes
    assert parts["gradient_blocks"] == made.grad_block_count * made.block_bytes
    assert parts["resident_weights"] == parts["weight_shards"] == parts["optimizer_states"] == parts["gradients"] == 0
    largest = max(param.numel for param in trace.parameters)
    assert parts["gradient_in_flight"] in (0, 2 * largest)
    assert made.predicted.moved_bytes["device_to_host"] == whole // 2
