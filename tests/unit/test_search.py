"""Plans fit what they were given, say what they need to the byte, and move no more than the first Elixir's would."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmark.original_rule import OriginalRule, rcache_first
from elixir.errors import ArtifactError, InputError, InputTypeError, PlanError
from elixir.hardware import HardwareProfile, preset
from elixir.plan import PARAM_ALIGNMENT_BYTES, Plan
from elixir.search import minimum_waste_search, optimal_search, plan_from_trace, simple_search
from elixir.search.budgets import CUDA_CONTEXT_BYTES, resolve_budgets
from elixir.search.homes import PlacementBuilder
from elixir.search.memory import MemoryModel, Setting
from elixir.search.optimal import find_best
from elixir.search.packing import ParamTable
from elixir.search.space import Budgets, SearchSpace
from elixir.search.workload import StepFacts, Workload
from elixir.tracer.step_trace import StepTrace
from elixir.units import GIB, MIB
from tests.common.recount import Recount, Recounter
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import StackShape, TraceBuilder, stack_trace

HARDWARE = replace(make_hardware(), flops_per_s={"bfloat16": 9e14, "float32": 4e14}, host_memory_bytes=512 * GIB)
SMALL = StackShape(hidden=1024, layers=8, ffn=4096, vocab=16384, positions=1024)
PLENTY = 1 << 50


def plan(trace: StepTrace, world_size: int = 1, *, device: int = PLENTY, host: int = PLENTY, **options: Any) -> Plan:
    """A plan on the sample machine."""
    return plan_from_trace(trace, HARDWARE, world_size, device_memory=device, host_memory=host, **options)


def link_bytes(made: Plan) -> int:
    """Bytes over the link between host and device."""
    return made.predicted.moved_bytes["host_to_device"] + made.predicted.moved_bytes["device_to_host"]


@st.composite
def traces(draw: st.DrawFn) -> StepTrace:
    """Layers of large parameters: some frozen, unused, tied across the step or pinned for long, maybe of two dtypes."""
    build = TraceBuilder()
    layers = draw(st.integers(1, 12))
    per_layer = draw(st.integers(1, 3))
    index_of = [
        [
            build.parameter(
                f"layers.{layer}.p{part}",
                draw(st.sampled_from([2, 3, 8, 16, 24, 40])) * MIB + draw(st.integers(0, 3)),
                dtype=draw(st.sampled_from(["bfloat16", "bfloat16", "float32"])),
                trainable=draw(st.integers(0, 4)) > 0,
            )
            for part in range(per_layer)
        ]
        for layer in range(layers)
    ]
    tied = build.parameter("embedding", draw(st.integers(1, 30)) * MIB // 2)
    unused = build.parameter("unused", draw(st.integers(1, 2 * MIB)))
    assert unused
    live = draw(st.integers(1, 64)) * MIB
    build.use("forward", tied, live=live)
    for layer in index_of:
        for index in layer:
            build.use("forward", index, flops=10**9, live=live, pin=draw(st.sampled_from([0, 0, 1, 4])))
    build.use("forward", tied, live=2 * live)
    build.use("backward", tied, live=2 * live)
    checkpointed = draw(st.booleans())
    for layer in reversed(index_of):
        for index in layer if checkpointed else ():
            build.use("recompute", index, flops=10**9, live=live)
        for index in reversed(layer):
            build.use("backward", index, flops=10**9, live=live, pin=draw(st.sampled_from([0, 0, 2])))
    build.use("backward", tied, live=live)
    names = tuple(f"layers.{layer}" for layer in range(layers)) if checkpointed else ()
    sizes = {name: draw(st.integers(0, 4)) * MIB for name in ("buffer_bytes", "workspace_bytes")}
    return replace(build.build("random", checkpointed=names, input_bytes=MIB), **sizes)


def check_consistent(made: Plan, trace: StepTrace) -> None:
    """What holds for every plan: it can be run from its file alone, and an independent count gives its numbers."""
    predicted = made.predicted
    assert predicted.device_peak_bytes <= made.device_budget_bytes
    assert predicted.host_peak_bytes <= made.host_budget_bytes
    infos = {param.name: param for param in trace.parameters}
    names = sorted(slot.name for chunk in made.chunks for slot in chunk.parameters)
    assert names == sorted(infos)
    for chunk in made.chunks:
        assert chunk.weight_bytes % (made.world_size * PARAM_ALIGNMENT_BYTES) == 0
        assert made.world_size > 1 or (chunk.weight_home == "device") == chunk.resident
        for slot in chunk.parameters:
            info = infos[slot.name]
            assert (slot.numel, chunk.dtype, chunk.trainable) == (info.numel, info.dtype, info.trainable)
    recounter = Recounter(made, trace, min(made.world_size, HARDWARE.devices_per_host))
    recounter.check_order()
    assert recounter.everything() == Recount(
        device_peak_bytes=predicted.device_peak_bytes,
        host_peak_bytes=predicted.host_peak_bytes,
        moved_bytes=predicted.moved_bytes,
        loads=predicted.loads,
        grad_blocks=made.grad_block_count,
    )
    # The runtime replays the order with the plan's own schedule: it will see the same loads.
    replayed = made.schedule().simulate(made.block_count)
    assert (replayed.loads, replayed.hits) == (predicted.loads, predicted.hits)
    assert Plan.from_json(made.to_json()) == made


@given(
    traces(),
    st.sampled_from([1, 1, 2, 3, 12]),
    st.sampled_from([0, 3, 10, 25, 50, 75, 100]),
    st.booleans(),
    st.sampled_from(["Adam", "SGD"]),
)
@settings(max_examples=40, deadline=None)
def test_plans_fit_say_what_they_need_and_move_no_more_than_the_original(
    trace: StepTrace, world_size: int, percent: int, overlap: bool, optimizer: str
) -> None:
    options: dict[str, Any] = {"overlap": overlap, "optimizer_type": optimizer}
    least = _needed(trace, world_size, **options)
    most = plan(trace, world_size, placement="cuda", **options).predicted.device_peak_bytes
    device = least + max(most - least, 0) * percent // 100
    made = plan(trace, world_size, device=device, **options)
    assert made.state_bytes_per_numel == (8 if optimizer == "Adam" else 4)
    check_consistent(made, trace)
    ranks_per_host = min(world_size, HARDWARE.devices_per_host)
    setting = Setting(world_size, ranks_per_host, made.state_bytes_per_numel, overlap)
    original = OriginalRule(trace, setting).choose(device)
    if original is not None:
        assert link_bytes(made) <= original.link_bytes


def _needed(trace: StepTrace, world_size: int, **options: Any) -> int:
    with pytest.raises(PlanError) as caught:
        plan(trace, world_size, device=0, **options)
    return caught.value.needed_bytes


@given(traces(), st.sampled_from([1, 4]))
@settings(max_examples=20, deadline=None)
def test_what_an_error_says_is_needed_is_exactly_enough(trace: StepTrace, world_size: int) -> None:
    needed = _needed(trace, world_size)
    made = plan(trace, world_size, device=needed)
    assert made.predicted.device_peak_bytes <= needed
    with pytest.raises(PlanError) as caught:
        plan(trace, world_size, device=needed - 1)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (needed, needed - 1)
    if made.predicted.host_peak_bytes:
        with pytest.raises(PlanError, match="host memory") as short:
            plan(trace, world_size, device=needed, host=0)
        enough = short.value.needed_bytes
        assert plan(trace, world_size, device=needed, host=enough).predicted.host_peak_bytes <= enough


@given(traces(), st.sampled_from([1, 2, 4]), st.integers(0, 90), st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_host_memory_that_is_needed_is_the_least_at_every_device_budget(
    trace: StepTrace, world_size: int, percent: int, overlap: bool
) -> None:
    least = _needed(trace, world_size, overlap=overlap)
    most = plan(trace, world_size, placement="cuda").predicted.device_peak_bytes
    for placement in ("auto", "cpu"):
        options: dict[str, Any] = {"overlap": overlap, "placement": placement}
        if placement == "cpu":
            least = _needed(trace, world_size, **options)
        options["device"] = least + max(most - least, 0) * percent // 100
        try:
            plan(trace, world_size, host=0, **options)
        except PlanError as short:
            needed = short.needed_bytes
            assert plan(trace, world_size, host=needed, **options).predicted.host_peak_bytes == needed
            with pytest.raises(PlanError):
                plan(trace, world_size, host=needed - 1, **options)


@given(traces(), st.sampled_from([1, 2]), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_builders_running_peak_is_the_models(trace: StepTrace, world_size: int, overlap: bool, random: Any) -> None:
    table = ParamTable(trace, world_size)
    packing = table.pack(random.randint(table.largest_bytes // 2, 3 * table.largest_bytes))
    model = MemoryModel(Workload(StepFacts(trace), packing), Setting(world_size, world_size, 8, overlap))
    builder = PlacementBuilder(model, 5)
    for _ in range(6):
        chunk = random.randrange(len(packing.chunks))
        resident = world_size == 1 or random.random() < 0.3
        builder.move(chunk, state=random.random() < 0.6, resident=resident, budget_bytes=PLENTY)
        blocks = min(5, builder.streamed)
        assert builder.peak_bytes() == model.need(builder.placement(), blocks).device_bytes
        budget = builder.peak_bytes() + 3 * packing.block_bytes
        assert builder.most_blocks(budget) == min(blocks + 3, builder.streamed)


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
    model = MemoryModel(Workload(StepFacts(trace), table.pack(table.largest_bytes)), Setting(1, 1, 8, False))
    builder = PlacementBuilder(model, 2)
    for chunk, grad_blocks in ((0, 2), (2, 1), (1, 1), (3, 0)):
        assert builder.move(chunk, state=True, resident=True, budget_bytes=PLENTY)
        need = model.need(builder.placement(), min(2, builder.streamed))
        assert builder.peak_bytes() == need.device_bytes
        assert need.grad_blocks == grad_blocks


@pytest.mark.parametrize(("name", "world_size"), [("opt-1.3b", 1), ("opt-13b", 4), ("gpt2-4b", 2), ("gpt2-20b", 1)])
def test_known_models_move_no_more_than_the_original(name: str, world_size: int) -> None:
    trace = stack_trace(name)
    rule = OriginalRule(trace, Setting(world_size, world_size, 8, True))
    for gib in (12, 40, 96):
        original = rule.choose(gib * GIB)
        if original is not None:
            assert link_bytes(plan(trace, world_size, device=gib * GIB)) <= original.link_bytes


def test_where_the_cap_binds_the_fastest_candidate_would_have_moved_more() -> None:
    trace = stack_trace("opt-30b")
    hardware = replace(HARDWARE, host_adam_numel_per_s=1e8)  # so slow that states on the device win against bytes
    setting = Setting(1, 1, 8, True)
    space = SearchSpace(trace, hardware, setting)
    budgets = Budgets(80 * GIB, PLENTY)
    outcomes = [find_best(space, budgets, space.sizes(outsized=True), 1, capped=capped) for capped in (True, False)]
    capped, free = (outcome.best for outcome in outcomes)
    assert capped is not None
    assert free is not None
    original = OriginalRule(trace, setting).choose(budgets.device_bytes)
    assert original is not None
    assert capped.moved.link_bytes <= original.link_bytes < free.moved.link_bytes
    assert free.seconds["total"] < capped.seconds["total"]


def test_the_originals_constants_serve_the_cache_first_on_one_gpu_only() -> None:
    cases = [(2, 8), (2, 4), (4, 8), (4, 4)]
    assert [[rcache_first(gpus, *case) for gpus in (1, 2, 4, 8)] for case in cases] == [[True, False, False, False]] * 4


def test_a_model_that_fits_is_plain_pytorch() -> None:
    trace = stack_trace(SMALL, dtype="float32")
    made = plan(trace)
    assert all(chunk.resident and chunk.state_home == "device" for chunk in made.chunks)
    assert (made.block_count, made.block_bytes, made.grad_block_count, made.predicted.loads) == (0, 0, 0, 0)
    assert link_bytes(made) == 0
    arrived, peak = 0, 0
    events = {param.grad_event: 0 for param in trace.parameters}
    for param in trace.parameters:
        events[param.grad_event] += param.numel * 4
    for index, event in enumerate(trace.accesses):
        arrived += events.get(index, 0)
        peak = max(peak, arrived + event.live_bytes)
    weights = sum(chunk.weight_bytes for chunk in made.chunks)
    states = 2 * weights
    assert made.predicted.device_peak_bytes == max(peak, arrived + trace.input_bytes) + weights + states


def test_bytes_of_a_plan_that_streams_everything() -> None:
    trace = stack_trace(SMALL)
    made = plan(trace, 2, placement="cpu", overlap=False)
    whole = sum(chunk.weight_bytes for chunk in made.chunks)
    numel = sum(chunk.numel for chunk in made.chunks)
    # Both ranks share the machine: bf16 weights and gradients, fp32 master and two moments.
    assert made.predicted.host_parts == {"weights": whole, "optimizer_states": 12 * numel, "gradients": whole}
    parts = made.predicted.device_parts
    assert parts["rcache"] == made.block_count * made.block_bytes
    assert parts["gradient_blocks"] == made.grad_block_count * made.block_bytes
    assert parts["resident_weights"] == parts["weight_shards"] == parts["optimizer_states"] == parts["gradients"] == 0
    largest = max(param.numel for param in trace.parameters)
    assert parts["gradient_in_flight"] in (0, 2 * largest)
    assert made.predicted.moved_bytes["device_to_host"] == whole // 2


def test_host_memory_is_that_of_the_ranks_of_one_machine() -> None:
    trace = stack_trace(SMALL)
    made = plan(trace, 16, placement="cpu")
    check_consistent(made, trace)
    whole = sum(chunk.weight_bytes for chunk in made.chunks)
    assert made.predicted.host_parts["weights"] == whole * HARDWARE.devices_per_host // 16


@pytest.mark.parametrize("world_size", [1, 2])
def test_peaks_at_the_optimizer_step_and_while_a_chunk_fills(world_size: int) -> None:
    for live in ((0, 0), (64 * MIB, 0), (0, 64 * MIB)):
        build = TraceBuilder()
        # Small enough to share a chunk, so that its gradient is whole only when the second has come.
        both = [build.parameter(f"w{i}", 2**20) for i in range(2)]
        rest = [build.parameter(f"rest{i}", 2**24) for i in range(2)]
        for index in (*both, *rest):
            build.use("forward", index)
        for index in rest:
            build.use("backward", index)
        for index, amount in zip(both, live, strict=True):
            build.use("backward", index, live=amount)
        trace = build.build("waiting")
        for placement in ("cuda", "cpu"):
            made = plan(trace, world_size, placement=placement)
            assert {"w0", "w1"} <= {slot.name for slot in made.chunks[0].parameters}
            check_consistent(made, trace)


def test_an_outsized_gradient_beside_another_is_counted() -> None:
    shape = StackShape(hidden=512, layers=12, ffn=2048, vocab=200_000, positions=512)
    trace = stack_trace(shape, batch=1, seq=128)
    for world_size in (1, 2):
        for overlap in (True, False):
            made = plan(trace, world_size, device=_needed(trace, world_size, overlap=overlap), overlap=overlap)
            check_consistent(made, trace)


def test_the_least_memory_is_slowest_and_the_most_is_fastest() -> None:
    trace = stack_trace("opt-1.3b")
    seconds = [plan(trace, device=gib * GIB).predicted.seconds["total"] for gib in (6, 10, 16, 30, 60)]
    assert seconds[-1] == min(seconds)
    assert seconds[0] == max(seconds)


def test_seconds_are_bytes_over_bandwidth_and_work_over_rates() -> None:
    build = TraceBuilder()
    numel = 2**24
    weights = [build.parameter(f"w{i}", numel) for i in range(4)]
    for index in weights:
        build.use("forward", index, flops=10**12, moved=10**6)
    for index in reversed(weights):
        build.use("backward", index, flops=10**6, moved=10**11)
    trace = build.build("timed")
    hardware = replace(
        HARDWARE,
        flops_per_s={"bfloat16": 1e15},
        matmul_efficiency=0.5,
        device_memory_bytes_per_s=1e12,
        host_memory_bytes_per_s=2e10,
        host_to_device_bytes_per_s=2e10,
        device_to_host_bytes_per_s=5e9,
        device_to_device_bytes_per_s=1e11,
        host_adam_numel_per_s=1e9,
    )
    world_size = 4
    made = plan_from_trace(trace, hardware, world_size, device_memory=PLENTY, host_memory=PLENTY, placement="cpu")
    moved, seconds = made.predicted.moved_bytes, made.predicted.seconds
    # Large products are bound by FLOP/s, the others by memory; gradients are read and written on their way to blocks.
    copied = sum(2 * chunk.weight_bytes for chunk in made.chunks)
    assert seconds["compute"] == pytest.approx(4 * 10**12 / 0.5e15 + (4 * 10**11 + copied) / 1e12)
    # Four devices share a host memory of 20 GB/s, so each link gets no more than 5 of them.
    assert seconds["host_to_device"] == pytest.approx(moved["host_to_device"] / 5e9)
    assert seconds["device_to_host"] == pytest.approx(moved["device_to_host"] / 5e9)
    assert seconds["network"] == pytest.approx(moved["network"] / 1e11, rel=0.3)  # latencies come on top
    # The host's Adam updates the shards of all four ranks.
    assert seconds["host_adam"] == pytest.approx(4 * numel / 1e9)
    assert seconds["total"] == pytest.approx(seconds["forward"] + seconds["backward"] + seconds["optimizer"])
    for phase, resources in (("forward", ("host_adam",)), ("backward", ("compute", "device_to_host"))):
        assert seconds[phase] >= max(seconds[name] for name in resources) * 0.9


def test_a_cpu_shares_its_memory_between_devices_and_host() -> None:
    shared = replace(preset("cpu"), host_memory_bytes=64 * GIB, measured_at=None)
    budgets = resolve_budgets(shared, 4, None, None)
    assert (budgets.device_bytes, budgets.host_bytes) == (8 * GIB, 32 * GIB)
    assert resolve_budgets(shared, 4, 10 * GIB, None).host_bytes == 24 * GIB
    assert resolve_budgets(shared, 4, None, 16 * GIB).device_bytes == 12 * GIB


def test_placement_is_obeyed_by_all_three() -> None:
    trace = stack_trace(SMALL)
    for search in (optimal_search, minimum_waste_search, simple_search):
        for world_size in (1, 2):
            budgets = {"device_memory": PLENTY, "host_memory": PLENTY}
            on_device = search(trace, world_size, hardware=HARDWARE, placement="cuda", **budgets)
            on_host = search(trace, world_size, hardware=HARDWARE, placement="cpu", **budgets)
            assert {(c.weight_home, c.state_home) for c in on_device.chunks} == {("device", "device")}
            assert {(c.weight_home, c.state_home, c.resident) for c in on_host.chunks} == {("host", "host", False)}
            check_consistent(on_device, trace)
            check_consistent(on_host, trace)


def test_a_huge_embedding_need_not_set_the_chunk_size() -> None:
    shape = StackShape(hidden=512, layers=12, ffn=2048, vocab=200_000, positions=512)
    trace = stack_trace(shape, batch=1, seq=128)
    made = plan(trace, device=_needed(trace, 1) + 8 * MIB)
    embedding = next(chunk for chunk in made.chunks if chunk.parameters[0].name == "embed_tokens.weight")
    assert embedding.resident
    assert embedding.state_home == "host"
    assert made.block_bytes < embedding.weight_bytes
    check_consistent(made, trace)


def test_frozen_unused_and_mixed_parameters_have_homes() -> None:
    trace = stack_trace(SMALL, frozen_layers=6)
    made = plan(trace, device=_needed(trace, 1) + 64 * MIB)
    assert {chunk.trainable for chunk in made.chunks} == {True, False}
    check_consistent(made, trace)
    build = TraceBuilder()
    used, idle = build.parameter("used", 4 * MIB), build.parameter("idle", 4 * MIB)
    full = build.parameter("full", 4 * MIB, dtype="float32")
    assert idle
    for phase in ("forward", "backward"):
        build.use(phase, used)
        build.use(phase, full)
    odd = build.build("odd")
    placed = plan(odd, placement="cpu")
    check_consistent(placed, odd)
    assert placed.predicted.moved_bytes["device_to_host"] == sum(
        chunk.weight_bytes for chunk in placed.chunks if any(s.name in ("used", "full") for s in chunk.parameters)
    )


def test_pins_keep_several_chunks_at_once() -> None:
    build = TraceBuilder()
    weights = [build.parameter(f"w{i}", 20 * MIB) for i in range(6)]
    for i in weights:
        build.use("forward", i, pin=2)
    for i in reversed(weights):
        build.use("backward", i)
    made = plan(build.build("pinned"), placement="cpu", overlap=False)
    check_consistent(made, build.build("pinned"))
    needed = max(
        len({c for use in made.order[: entry + 1] if use.pin_until >= entry for c in use.chunks})
        for entry in range(len(made.order))
    )
    assert needed == 3
    assert made.block_count >= 3


def test_overlap_is_given_up_only_where_nothing_fits_with_it() -> None:
    trace = stack_trace(SMALL)
    needed = _needed(trace, 1)
    assert not plan(trace, device=needed).overlap or plan(trace, device=needed).prefetch_depth == 1
    roomy = plan(trace, device=needed + 512 * MIB)
    assert roomy.overlap
    assert roomy.prefetch_depth == 1


def test_levers_are_sorted_and_true() -> None:
    trace = stack_trace("opt-1.3b", checkpoint=False)
    with pytest.raises(PlanError) as caught:
        plan(trace, device=8 * GIB)
    levers = caught.value.levers
    assert [lever.saves_bytes for lever in levers] == sorted((lever.saves_bytes for lever in levers), reverse=True)
    batch = next(lever for lever in levers if "batch" in lever.action)
    half = stack_trace("opt-1.3b", checkpoint=False, batch=4)
    assert caught.value.needed_bytes - _needed(half, 1) == pytest.approx(batch.saves_bytes, rel=0.01)
    assert any("checkpointing" in lever.action for lever in levers)


def test_a_parameter_larger_than_every_chunk_that_fits_is_named() -> None:
    trace = stack_trace(StackShape(hidden=512, layers=2, ffn=2048, vocab=500_000, positions=64), batch=1, seq=8)
    with pytest.raises(PlanError, match=r"'embed_tokens\.weight' .* larger than every chunk"):
        plan(trace, device=400 * MIB)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"world_size": 0}, InputError, "world_size must be 1 or larger, got 0"),
        ({"world_size": True}, InputTypeError, "whole number"),
        ({"world_size": 2.0}, InputTypeError, "whole number"),
        ({"device_memory": "12XB"}, InputError, "no size"),
        ({"optimizer_type": "Adan"}, InputError, "did you mean"),
        ({"placement": "gpu"}, InputError, "placement must be one of"),
        ({"hardware": 3}, InputTypeError, "HardwareProfile"),
        ({"hardware": "h2000"}, InputError, "h200"),
        ({"unified_dtype": torch.float32}, InputError, "trace the model again"),
        ({"unified_dtype": "fp17"}, InputError, "unknown dtype"),
        ({"model": "opt-13b"}, InputTypeError, "nn.Module or a StepTrace"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"model": stack_trace(SMALL), "world_size": 1, "hardware": HARDWARE} | options
    with pytest.raises(error, match=message):
        optimal_search(**arguments)


def test_inp_must_be_a_dict() -> None:
    with pytest.raises(InputTypeError, match="inp must be a dict"):
        optimal_search(nn.Linear(2, 2), 1, inp=[1], hardware=HARDWARE)  # type: ignore[arg-type]


def test_nothing_to_train_is_refused() -> None:
    build = TraceBuilder()
    build.use("forward", build.parameter("w", 8, trainable=False))
    with pytest.raises(InputError, match="no trainable parameters"):
        plan(build.build("frozen"))


def test_a_missing_rate_names_its_dtype() -> None:
    with pytest.raises(InputError, match="float16"):
        plan(stack_trace(SMALL, dtype="float16"))


def test_simple_search_does_as_told() -> None:
    trace = stack_trace(StackShape(hidden=512, layers=24, ffn=2048, vocab=4096, positions=512))
    made = simple_search(trace, 2, split_number=8, allocate_factor=0.5, shard_device="cpu", hardware=HARDWARE)
    assert 8 <= len(made.chunks) <= 10
    assert made.block_count == -(-len(made.chunks) // 2)
    assert {chunk.weight_home for chunk in made.chunks} == {"host"}
    check_consistent(made, trace)
    with pytest.raises(PlanError, match="asked for does not fit the device"):
        simple_search(trace, 2, hardware=HARDWARE, device_memory="1MiB")
    for bad in ({"split_number": 0}, {"allocate_factor": 0.0}, {"shard_device": "disk"}):
        with pytest.raises(InputError, match=next(iter(bad))):
            simple_search(trace, 2, hardware=HARDWARE, **bad)  # type: ignore[arg-type]


def test_minimum_waste_search_reports_its_own_need() -> None:
    trace = stack_trace(SMALL)
    with pytest.raises(PlanError) as caught:
        minimum_waste_search(trace, 1, hardware=HARDWARE, device_memory=0, host_memory=PLENTY)
    needed = caught.value.needed_bytes
    made = minimum_waste_search(trace, 1, hardware=HARDWARE, device_memory=needed, host_memory=PLENTY)
    check_consistent(made, trace)


def test_a_module_is_traced_and_planned() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))

    def step(module: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        module(batch["x"]).square().mean().backward()

    made = optimal_search(
        model,
        2,
        unified_dtype=torch.bfloat16,
        inp={"x": torch.zeros(4, 64)},
        step_fn=step,
        hardware="h200",
        host_memory="1GiB",
    )
    assert made.dtype == "bfloat16"
    assert sorted(slot.name for chunk in made.chunks for slot in chunk.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    made.check(made.model_fingerprint, 2)
    with pytest.raises(ArtifactError, match="model_fingerprint"):
        made.check("0" * 16, 2)
    with pytest.raises(ArtifactError, match="world_size"):
        made.check(made.model_fingerprint, 4)


def test_budgets_come_from_the_profile_where_it_is_another_machine() -> None:
    elsewhere: HardwareProfile = replace(HARDWARE, device_name="No such device")
    budgets = resolve_budgets(elsewhere, 1, None, None)
    assert budgets.device_bytes == elsewhere.device_memory_bytes - CUDA_CONTEXT_BYTES
    assert budgets.host_bytes == elsewhere.host_memory_bytes
    with pytest.raises(InputError, match="host_memory"):
        resolve_budgets(replace(elsewhere, host_memory_bytes=None), 1, None, None)
    given_sizes = resolve_budgets(elsewhere, 1, "2GiB", 5)
    assert (given_sizes.device_bytes, given_sizes.host_bytes) == (2 * GIB, 5)


def test_the_same_plan_in_every_process() -> None:
    code = (
        "from tests.common.samples import make_hardware\n"
        "from tests.common.synthetic_trace import StackShape, stack_trace\n"
        "from elixir.search import plan_from_trace\n"
        "trace = stack_trace(StackShape(hidden=1024, layers=8, ffn=4096, vocab=16384, positions=1024))\n"
        "for budget in ('1100MiB', '100GiB'):\n"
        "    options = {'device_memory': budget, 'host_memory': '1TiB'}\n"
        "    print(plan_from_trace(trace, make_hardware(), 4, **options).fingerprint)\n"
    )
    root = Path(__file__).parents[2]
    outputs = set()
    for seed in ("0", "31"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 2
