"""Plans that leave frozen weights in their files: no host memory for them, reads that are counted and take their time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.errors import InputError, PlanError
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from elixir.plan.plan import Plan
from elixir.search import plan_from_trace
from elixir.step_trace import StepTrace
from tests.common.searching import HARDWARE
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


def test_only_streamed_frozen_chunks_may_be_there() -> None:
    chunk = ChunkPlan("float32", False, 256, (ParamSlot("a", 0, 200),), "files", "files", False)
    assert chunk.file_bytes(0, 2) == 512
    assert chunk.file_bytes(1, 2) == 288
    for change in ({"trainable": True}, {"resident": True}, {"state_home": "host"}, {"weight_home": "host"}):
        with pytest.raises(InputError, match="files"):
            replace(chunk, **change)  # type: ignore[arg-type]
