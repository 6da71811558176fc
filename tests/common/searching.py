"""Random traces, plans for them on a sample machine, and what holds for every plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from elixir.errors import PlanError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.search.planner import plan_or_shortage
from elixir.search.question import Question
from elixir.search.request import SearchRequest
from elixir.step_trace import StepTrace
from elixir.units import GIB, MIB
from tests.common.recount import Recount, Recounter
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import StackShape, TraceBuilder

FLOPS_PER_S = {"bfloat16": 9e14, "float32": 4e14, "float64": 6e13}
HARDWARE = replace(make_hardware(), flops_per_s=FLOPS_PER_S, host_memory_bytes=512 * GIB)
SMALL = StackShape(hidden=1024, layers=8, ffn=4096, vocab=16384, positions=1024)
PLENTY = 1 << 50


def plan(trace: StepTrace, world_size: int = 1, *, device: int = PLENTY, host: int = PLENTY, **options: Any) -> Plan:
    """A plan on the sample machine."""
    return plan_from_trace(trace, HARDWARE, world_size, **_with_budgets(device=device, host=host, **options)).plan


def _with_budgets(*, device: int = PLENTY, host: int = PLENTY, **options: Any) -> dict[str, Any]:
    return {"device_memory": device, "host_budget": host, **options}


def link_bytes(made: Plan) -> int:
    """Bytes over the link between host and device."""
    return made.predicted.moved_bytes["host_to_device"] + made.predicted.moved_bytes["device_to_host"]


@st.composite
def traces(draw: st.DrawFn, dtypes: tuple[str, ...] = ("bfloat16", "bfloat16", "float32")) -> StepTrace:
    """Layers of large parameters: some frozen, unused, tied across the step or pinned for long, maybe of several
    dtypes."""
    build = TraceBuilder()
    layers = draw(st.integers(1, 12))
    per_layer = draw(st.integers(1, 3))
    index_of = [
        [
            build.parameter(
                f"layers.{layer}.p{part}",
                draw(st.sampled_from([2, 3, 8, 16, 24, 40])) * MIB + draw(st.integers(0, 3)),
                dtype=draw(st.sampled_from(dtypes)),
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
    """Checks what holds for every plan: it can be run from its file alone, and an independent count gives its
    numbers."""
    predicted = made.predicted
    assert predicted.device_peak_bytes <= made.device_budget_bytes
    assert predicted.host_peak_bytes <= made.host_budget_bytes
    assert predicted.disk_peak_bytes <= made.disk_budget_bytes
    infos = {param.name: param for param in trace.parameters}
    names = sorted(slot.name for chunk in made.chunks for slot in chunk.parameters)
    assert names == sorted(infos)
    for chunk in made.chunks:
        assert chunk.weight_bytes % (made.shards * made.alignment_bytes) == 0
        assert made.world_size > 1 or (chunk.weight_home == "device") == chunk.resident
        for slot in chunk.parameters:
            info = infos[slot.name]
            assert (slot.numel, chunk.dtype, chunk.trainable) == (info.numel, info.dtype, info.trainable)
    recounter = Recounter(made, trace, HARDWARE.ranks_per_host(made.world_size))
    recounter.check_order()
    assert recounter.everything() == Recount(
        device_peak_bytes=predicted.device_peak_bytes,
        host_peak_bytes=predicted.host_peak_bytes,
        host_step_bytes=predicted.host_step_bytes,
        disk_peak_bytes=predicted.disk_peak_bytes,
        moved_bytes=predicted.moved_bytes,
        loads=predicted.loads,
        grad_blocks=made.grad_block_count,
    )
    # The runtime replays the order with the plan's own schedule: it will see the same loads.
    replayed = made.schedule().simulate(made.block_count)
    assert (replayed.loads, replayed.hits) == (predicted.loads, predicted.hits)
    assert Plan.from_json(made.to_json()) == made


def least_needed(trace: StepTrace, world_size: int, **options: Any) -> int:
    """Least device memory, as the error says it."""
    return shortage(trace, HARDWARE, world_size, **_with_budgets(device=0, **options)).needed_bytes


def shortage(trace: StepTrace, hardware: HardwareProfile, world_size: int, **options: Any) -> PlanError:
    """The error without its advice, for which everything is planned again several times."""
    with pytest.raises(PlanError) as caught:
        plan_or_shortage(Question(trace, hardware, SearchRequest.of(world_size, **options)))
    return caught.value
