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
from elixir.hardware.profile import HardwareProfile, preset
from elixir.search import minimum_waste_search, optimal_search, simple_search
from elixir.search.budgets import (
    CUDA_CONTEXT_BYTES,
    NCCL_BYTES,
    PAGE_CACHE_SHARE,
    SYSTEM_BYTES,
    default_device_reserve,
    default_host_reserve,
    resolve_budgets,
)
from elixir.search.planner import plan_or_shortage, planned
from elixir.search.question import Question
from elixir.search.request import FREE_HERE, SearchRequest
from elixir.units import GIB, MIB
from tests.common import inside
from tests.common.samples import make_trace
from tests.common.searching import HARDWARE, PLENTY, SMALL, check_consistent, least_needed, plan, shortage
from tests.common.synthetic_trace import StackShape, TraceBuilder, stack_trace

_GIVEN: dict[str, Any] = {"device_memory": PLENTY, "host_budget": PLENTY}


def test_a_plan_that_fits_leaves_what_is_kept_back_for_the_allocator(caplog: pytest.LogCaptureFixture) -> None:
    request = SearchRequest(world_size=1, host_budget=PLENTY, search="minimum_waste", assume="nominal")
    plan_or_shortage(Question(make_trace(), replace(HARDWARE, device_name="No such device"), request))
    assert "expandable_segments" not in caplog.text


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


def test_a_plan_knows_which_budgets_were_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir.search.budgets.free_host_bytes", lambda: 64 * GIB)
    promised = replace(preset("cpu"), host_memory_bytes=64 * GIB, measured_at=None)
    here = replace(preset("cpu"), host_memory_bytes=None)
    small: dict[str, Any] = {"world_size": 1, "device_memory": "4GiB", "host_budget": "4GiB"}
    for without, expected in (((), ()), (("device",), ("device",)), (("host",), ("host",))):
        given = {name: value for name, value in small.items() if name.partition("_")[0] not in without}
        assert resolve_budgets(here, SearchRequest(**given)).read == expected
        assert optimal_search(stack_trace(SMALL), hardware=here, **given).read_budgets == expected
        assert resolve_budgets(promised, SearchRequest(**given)).read == ()
    assert resolve_budgets(here, SearchRequest(world_size=1)).read == ("device", "host")
    assert resolve_budgets(HARDWARE, SearchRequest(world_size=1, host_memory=FREE_HERE)).read == ("host",)


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


def test_a_model_with_nothing_to_train_is_planned_for_evaluation() -> None:
    build = TraceBuilder()
    build.use("forward", build.parameter("w", 8, trainable=False))
    found = plan(build.build("frozen"))
    assert [chunk.trainable for chunk in found.chunks] == [False]
    assert found.predicted.seconds["backward"] == found.predicted.seconds["optimizer"] == 0


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


def test_minimum_waste_search_reports_its_own_need() -> None:
    trace = stack_trace(SMALL)
    with pytest.raises(PlanError) as caught:
        minimum_waste_search(trace, 1, hardware=HARDWARE, device_memory=0, host_budget=PLENTY)
    needed = caught.value.needed_bytes
    made = minimum_waste_search(trace, 1, hardware=HARDWARE, device_memory=needed, host_budget=PLENTY).plan
    check_consistent(made, trace)


def test_budgets_come_from_the_profile_where_it_is_another_machine() -> None:
    elsewhere: HardwareProfile = replace(HARDWARE, device_name="No such device")
    budgets = resolve_budgets(elsewhere, SearchRequest(world_size=1))
    there = elsewhere.device_memory_bytes - CUDA_CONTEXT_BYTES
    assert budgets.device_bytes == there - budgets.device_reserve_bytes
    assert budgets.device_reserve_bytes == default_device_reserve(there, 1)
    assert budgets.host_bytes + budgets.host_reserve_bytes == elsewhere.host_memory_bytes
    whole = resolve_budgets(elsewhere, SearchRequest(world_size=1, device_reserve=0, host_reserve="1GiB"))
    assert (whole.device_bytes, whole.device_reserve_bytes) == (there, 0)
    assert whole.host_bytes == elsewhere.host_memory_bytes - GIB
    with pytest.raises(InputError, match="host_memory='512GiB'"):
        resolve_budgets(replace(elsewhere, host_memory_bytes=None), SearchRequest(world_size=1))
    given_sizes = resolve_budgets(elsewhere, SearchRequest(world_size=1, device_memory="2GiB", host_budget=5))
    assert (given_sizes.device_bytes, given_sizes.host_bytes) == (2 * GIB, 5)
    assert (given_sizes.device_reserve_bytes, given_sizes.host_reserve_bytes) == (0, 0)
    more = resolve_budgets(elsewhere, SearchRequest(world_size=2, reserve="1GiB"))
    kept = default_host_reserve(elsewhere.host_memory_bytes or 0, 2)
    assert more.host_reserve_bytes == kept + 2 * GIB  # each of two processes takes it
    for size in ({"device_reserve": GIB}, {"host_reserve": GIB}):
        with pytest.raises(InputError, match="taken as given"):
            resolve_budgets(elsewhere, SearchRequest(world_size=1, device_memory="2GiB", host_budget="2GiB", **size))


def test_what_is_free_here_is_planned_with_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir.search.budgets.is_this_machine", lambda hardware: True)
    monkeypatch.setattr("elixir.search.budgets.free_device_bytes", lambda device: 138 * GIB)
    monkeypatch.setattr("elixir.search.budgets.free_host_bytes", lambda: 114 * GIB)
    inside.forget(monkeypatch, "promises")  # of models that other tests have left open
    budgets = resolve_budgets(HARDWARE, SearchRequest(world_size=1))
    assert budgets.device_bytes == 138 * GIB - default_device_reserve(138 * GIB, 1) < 132 * GIB
    assert budgets.host_bytes == 114 * GIB - int(PAGE_CACHE_SHARE * 114 * GIB)
    made = optimal_search(stack_trace(SMALL), 1, hardware=HARDWARE).plan
    assert made.device_reserve_bytes == budgets.device_reserve_bytes
    assert str(made).count("kept back") == 2
    assert "kept back" not in str(optimal_search(stack_trace(SMALL), 1, hardware=HARDWARE, **_GIVEN))


@pytest.mark.parametrize("gib", [1, 4, 8, 24, 80, 139])
def test_reserves_suit_every_size_of_machine(gib: int) -> None:
    for ranks in (1, 8):
        assert 0 < default_host_reserve(gib * GIB, ranks) <= gib * GIB // 4
        assert 0 < default_device_reserve(gib * GIB, ranks) <= gib * GIB // 4
        assert default_host_reserve(gib * GIB, ranks, here=True) <= default_host_reserve(gib * GIB, ranks)
    if gib >= 8:
        assert default_device_reserve(gib * GIB, 8) == default_device_reserve(gib * GIB, 1) + NCCL_BYTES
        assert default_device_reserve(gib * GIB, 1) > GIB


def test_a_plan_says_how_long_host_memory_takes_to_be_ready_where_that_was_measured() -> None:
    trace = stack_trace(SMALL)
    assert optimal_search(trace, 1, hardware=HARDWARE, placement="cpu", **_GIVEN).start_up_s == 0
    slow = replace(HARDWARE, host_pin_bytes_per_s=1e6)
    made = optimal_search(trace, 1, hardware=slow, placement="cpu", **_GIVEN).plan
    assert made.start_up_s == pytest.approx(made.predicted.host_step_bytes / 1e6)
    assert "until host memory is ready" in str(made)
    assert "until host memory is ready" not in str(replace(made, start_up_s=0.5))
    assert slow.fingerprint == HARDWARE.fingerprint


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
