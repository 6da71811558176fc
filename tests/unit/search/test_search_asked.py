"""The searches do as they are asked, refuse what makes no sense, and give the same plan in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError, InputTypeError, PlanError
from elixir.hardware.process_memory import estimated_bytes
from elixir.hardware.profile import preset
from elixir.search import minimum_waste_search, optimal_search, simple_search
from elixir.search.budgets import (
    CUDA_CONTEXT_BYTES,
    SYSTEM_BYTES,
    default_host_reserve,
    resolve_budgets,
)
from elixir.search.planner import plan_or_shortage, planned
from elixir.search.question import Question
from elixir.search.request import SearchRequest
from elixir.units import GIB, MIB
from tests.common.searching import HARDWARE, PLENTY, SMALL, check_consistent, least_needed, plan, shortage
from tests.common.synthetic_trace import StackShape, TraceBuilder, stack_trace


def test_a_cpu_shares_its_memory_between_devices_and_host() -> None:
    shared = replace(preset("cpu"), host_memory_bytes=64 * GIB, measured_at=None)
    kept = default_host_reserve(64 * GIB, 4, "cpu")
    assert kept == SYSTEM_BYTES + estimated_bytes("cpu", 4)
    budgets = resolve_budgets(shared, SearchRequest(world_size=4))
    assert (budgets.device_bytes, budgets.host_bytes) == ((64 * GIB - kept) // 8, (64 * GIB - kept) // 2)
    assert resolve_budgets(shared, SearchRequest(world_size=4, device_memory=10 * GIB)).host_bytes == 24 * GIB - kept
    assert (
        resolve_budgets(shared, SearchRequest(world_size=4, host_budget=16 * GIB)).device_bytes == 12 * GIB - kept // 4
    )
    assert (
        resolve_budgets(shared, SearchRequest(world_size=4, device_memory=10 * GIB, host_reserve=0)).host_bytes
        == 24 * GIB
    )


def test_placement_is_obeyed_by_all_three() -> None:
    trace = stack_trace(SMALL)
    for search in (optimal_search, minimum_waste_search, simple_search):
        for world_size in (1, 2):
            budgets = {"device_memory": PLENTY, "host_budget": PLENTY}
            on_device = search(trace, world_size, hardware=HARDWARE, placement="cuda", **budgets)
            on_host = search(trace, world_size, hardware=HARDWARE, placement="cpu", **budgets)
            assert {(c.weight_home, c.state_home) for c in on_device.chunks} == {("device", "device")}
            assert {(c.weight_home, c.state_home, c.resident) for c in on_host.chunks} == {("host", "host", False)}
            check_consistent(on_device, trace)
            check_consistent(on_host, trace)


def test_a_parameter_larger_than_every_chunk_that_fits_is_named() -> None:
    trace = stack_trace(StackShape(hidden=512, layers=2, ffn=2048, vocab=500_000, positions=64), batch=1, seq=8)
    with pytest.raises(PlanError, match=r"'embed_tokens\.weight' .* larger than every chunk"):
        plan(trace, device=400 * MIB)
    build = TraceBuilder()
    build.use("backward", build.parameter("w", 8 * MIB), live=100 * MIB)
    one = build.build("one")
    what = [shortage(one, HARDWARE, 1, device_memory=100 * MIB - less, host_budget=PLENTY).what for less in (0, 1)]
    assert "larger than every chunk" in what[0]
    assert "activations, inputs and buffers alone" in what[1]


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


def test_a_missing_rate_names_its_dtype() -> None:
    with pytest.raises(InputError, match="float16"):
        plan(stack_trace(SMALL, dtype="float16"))


def test_simple_search_does_as_told() -> None:
    trace = stack_trace(StackShape(hidden=512, layers=24, ffn=2048, vocab=4096, positions=512))
    made = simple_search(trace, 2, split_number=8, allocate_factor=0.5, shard_device="cpu", hardware=HARDWARE).plan
    assert 8 <= len(made.chunks) <= 10
    assert made.block_count == -(-len(made.chunks) // 2)
    assert {chunk.weight_home for chunk in made.chunks} == {"host"}
    check_consistent(made, trace)
    with pytest.raises(PlanError, match="asked for does not fit the device"):
        simple_search(trace, 2, hardware=HARDWARE, device_memory="1MiB")
    for bad in ({"split_number": 0}, {"allocate_factor": 0.0}, {"shard_device": "disk"}):
        with pytest.raises(InputError, match=next(iter(bad))):
            simple_search(trace, 2, hardware=HARDWARE, **bad)  # type: ignore[arg-type]


def test_what_is_kept_back_is_named_where_nothing_fits() -> None:
    trace = stack_trace(SMALL)
    tiny = replace(HARDWARE, device_name="No such device", device_memory_bytes=CUDA_CONTEXT_BYTES + 20 * MIB)
    with pytest.raises(PlanError, match="keep back less of the device") as refused:
        optimal_search(trace, 1, hardware=tiny, host_budget=PLENTY)
    assert any(lever.argument == "device_reserve" for lever in refused.value.levers)


def test_a_plan_may_take_what_is_kept_back_for_the_allocator_before_it_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace = stack_trace(SMALL)
    whole = int(least_needed(trace, 1) / 0.78)  # a quarter is kept back, a fifth without the allocator's part
    tight = replace(HARDWARE, device_name="No such device", device_memory_bytes=CUDA_CONTEXT_BYTES + whole)
    request = SearchRequest(world_size=1, host_budget=PLENTY, assume="nominal")
    made = plan_or_shortage(Question(trace, tight, request))
    assert "expandable_segments:True" in caplog.text
    assert planned(Question(trace, tight, request)) == made


@pytest.mark.slow
def test_the_same_plan_in_every_process() -> None:
    code = (
        "from tests.common.samples import make_hardware\n"
        "from tests.common.synthetic_trace import StackShape, stack_trace\n"
        "from elixir.search import plan_from_trace\n"
        "trace = stack_trace(StackShape(hidden=1024, layers=8, ffn=4096, vocab=16384, positions=1024))\n"
        "for budget, early in (('1100MiB', False), ('100GiB', False), ('1100MiB', True)):\n"
        "    options = {'device_memory': budget, 'host_budget': '1TiB', 'early_updates': early}\n"
        "    print(plan_from_trace(trace, make_hardware(), 4, **options).fingerprint)\n"
    )
    root = Path(__file__).parents[3]
    outputs = set()
    for seed in ("0", "31"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) == 3
