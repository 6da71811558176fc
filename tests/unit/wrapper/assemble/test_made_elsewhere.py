"""A plan for other hardware than it runs on says so once, when a model is wrapped."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from elixir.hardware import memory as free_memory
from elixir.hardware.profile import other_device, preset
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.assemble import chunks
from tests.common import gpu
from tests.common.parity import case, make_plan


def wrapped(plan: Plan, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings when a model is wrapped under `plan` and trained for a step."""
    it = case("opt", layers=1)
    with caplog.at_level(logging.WARNING):
        module = ElixirModule(it.model, plan, device="cpu")
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
        optimizer.backward(it.loss(module, it.inp))
        optimizer.step()
        module.close()
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(case("opt", layers=1), "streamed")


def test_a_plan_for_this_device_is_run_without_a_word(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    assert wrapped(plan, caplog) == []
    here = free_memory.cpu_name()
    measured = dataclasses.replace(plan, hardware_name="mine", device_name=f"{here}, 3 threads")
    assert wrapped(measured, caplog) == []
    assert wrapped(dataclasses.replace(plan, hardware_name="mine", device_name=""), caplog) == []


def test_a_plan_for_a_gpu_says_so_on_a_cpu(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    made = dataclasses.replace(plan, hardware_name="h200", device_name=preset("h200").device_name)
    (said,) = wrapped(made, caplog)
    assert f"made for 1 x h200 ({preset('h200').device_name}), but it runs on cpu ({free_memory.cpu_name()})" in said
    assert "plan again with hardware=" in said


def test_a_plan_for_another_machine_of_the_same_kind(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = wrapped(dataclasses.replace(plan, hardware_name="lab", device_name="Acme 9000, 64 cores"), caplog)
    assert "made for 1 x lab (Acme 9000, 64 cores), but it runs on cpu" in said


def test_a_plan_that_needs_more_memory_than_there_is(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    parts = dict.fromkeys(plan.predicted.host_parts, 0) | {"weights": 2**50}
    larger = dataclasses.replace(plan.predicted, host_parts=parts, host_peak_bytes=2**50)
    (said,) = wrapped(dataclasses.replace(plan, predicted=larger), caplog)
    assert "it needs 1024.00 TiB of host memory, of which this machine has" in said


@pytest.mark.parametrize("more", [0, 1])
def test_a_plan_may_need_all_the_memory_of_a_machine(
    plan: Plan, more: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "total_host_bytes", lambda: plan.predicted.host_peak_bytes - more)
    assert len(wrapped(plan, caplog)) == more


@gpu.on_the_cpu("the names of devices are made up")
@pytest.mark.parametrize(
    ("name", "here", "same"),
    [
        ("h200", "NVIDIA H200", True), ("rtx4090", "NVIDIA GeForce RTX 4090", True),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", True), ("h200", "NVIDIA A100-SXM4-80GB", False),
        ("cpu", "NVIDIA H200", False),
    ],
)  # fmt: skip
def test_presets_are_known_by_their_number(name: str, here: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "device_name_here", lambda kind: here)
    assert other_device(name, preset(name).device_name, "cuda") == (None if same else here)
