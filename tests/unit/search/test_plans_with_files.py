"""Plans that leave frozen weights in their files: no host memory for them, reads that are counted and take their time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.errors import InputError, PlanError
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from elixir.plan.plan import FILE_BUFFERS, Plan
from elixir.search import plan_from_trace
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from tests.common.searching import HARDWARE, check_consistent
from tests.common.synthetic_trace import StackShape, stack_trace

FAST = replace(HARDWARE, disk_read_bytes_per_s=6e9, disk_write_bytes_per_s=3e9)


@pytest.fixture(scope="module")
def stack() -> StepTrace:
    """A stack whose matrices are frozen; one small parameter of each layer is trained."""
    trace = stack_trace(StackShape(hidden=256, layers=8, ffn=1024, vocab=1024, positions=256), batch=2, seq=256)
    frozen = [
        parameter if parameter.numel < 2**14 else replace(parameter, trainable=False, grad_access=None, grad_arrivals=0)
        for parameter in trace.parameters
    ]
    return replace(trace, parameters=tuple(frozen))


@pytest.fixture(scope="module")
def small(stack: StepTrace) -> dict[str, object]:
    """A device that does not hold the weights, and a host that holds an eighth of the frozen ones."""
    with pytest.raises(PlanError) as caught:
        planned(stack, device_memory=1)
    return {
        "device_memory": int(1.2 * caught.value.needed_bytes),
        "host_budget": stack.frozen_bytes // 8,
        "placement": "auto",
    }


def planned(trace: StepTrace, world_size: int = 1, hardware: object = FAST, **options: object) -> Plan:
    budgets = {"device_memory": "1GiB", "host_budget": "1GiB", "placement": "cpu", "assume": "nominal"}
    return plan_from_trace(trace, hardware, world_size, **budgets | options).plan  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_needs_no_memory_for_them(stack: StepTrace, ranks: int) -> None:
    on_host, in_files = (planned(stack, ranks, frozen_weights=where) for where in ("host", "files"))
    frozen = [chunk for chunk in in_files.chunks if not chunk.trainable]
    assert frozen
    assert all(chunk.weight_home == chunk.state_home == "files" for chunk in frozen)
    window = FILE_BUFFERS * max(chunk.weight_bytes for chunk in frozen)
    parts = in_files.predicted.host_parts
    assert parts["file_window"] == window
    assert parts["weights"] == on_host.predicted.host_parts["weights"] - sum(chunk.weight_bytes for chunk in frozen)
    moved, before = in_files.predicted.moved_bytes, on_host.predicted.moved_bytes
    loads = in_files.schedule().step(in_files.block_count, 1).by_chunk
    read = sum(
        loads[index] * chunk.file_bytes(0, ranks) for index, chunk in enumerate(in_files.chunks) if loads.get(index)
    )
    assert moved == before | {"disk_read": read}
    assert simulate_step(in_files, stack, FAST).moved_bytes["disk_read"] == read > 0
    assert Plan.from_json(in_files.to_json()) == in_files
    check_consistent(in_files, stack)


def test_only_streamed_frozen_chunks_may_be_there() -> None:
    chunk = ChunkPlan("float32", False, 256, (ParamSlot("a", 0, 200),), "files", "files", False)
    assert chunk.file_bytes(0, 2) == 512
    assert chunk.file_bytes(1, 2) == 288
    for change in ({"trainable": True}, {"resident": True}, {"state_home": "host"}, {"weight_home": "host"}):
        with pytest.raises(InputError, match="files"):
            replace(chunk, **change)  # type: ignore[arg-type]
