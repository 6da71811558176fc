"""Calls that come before a step count by their memory, and leave the order of uses to the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import elixir
from elixir.tracer.use_order import memory_alone
from tests.common.tiny_models import tiny
from tests.common.tracing import cpu_trace

IDS = torch.arange(2, 18).reshape(2, 8)


def policy() -> Any:
    return tiny("llama", layers=2, positions=64)


def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
    model(input_ids=inp["input_ids"], labels=inp["input_ids"]).loss.backward()


def test_the_order_is_that_of_the_step_and_the_first_use_has_the_memory() -> None:
    def generating(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        with memory_alone(), torch.no_grad():
            model(input_ids=inp["input_ids"].repeat(16, 4))
        step(model, inp)

    alone, both = (cpu_trace(policy(), {"input_ids": IDS}, each) for each in (step, generating))
    assert len(both.accesses) == len(alone.accesses)
    assert [(a.phase, a.parameters, a.pin_until) for a in both.accesses] == [
        (a.phase, a.parameters, a.pin_until) for a in alone.accesses
    ]
    assert [p.grad_access for p in both.parameters] == [p.grad_access for p in alone.parameters]
    assert both.accesses[0].live_bytes > 4 * max(access.live_bytes for access in alone.accesses)
    assert max(a.live_bytes for a in both.accesses[1:]) < 1.1 * max(a.live_bytes for a in alone.accesses)


def test_a_model_that_the_step_does_not_call_again_stays_in_the_order() -> None:
    models = elixir.together(policy=policy(), reference=policy().requires_grad_(False))

    def referring(models: Any, inp: dict[str, torch.Tensor]) -> None:
        with memory_alone(), torch.no_grad():
            models.policy(**inp)
            models.reference(**inp)
        step(models.policy, inp)

    trace = cpu_trace(models, {"input_ids": IDS}, referring)
    assert trace.accesses[0].module.startswith("reference")
    ahead = sum(access.module.startswith("reference") for access in trace.accesses)
    alone = cpu_trace(policy(), {"input_ids": IDS}, step)
    # The batch is kept since the reference has read it.
    assert [a.kept_bytes for a in trace.accesses[ahead : ahead + 1]] == [IDS.nbytes]
    differs = {"parameters": (), "pin_until": 0, "live_bytes": 0, "module": "", "kept_bytes": 0}
    assert [replace(a, **differs) for a in trace.accesses[ahead:]] == [replace(a, **differs) for a in alone.accesses]


def test_a_model_on_meta_has_its_own_forwards_after_a_trace_with_fused_kernels() -> None:
    with torch.device("meta"):
        model = policy()
    trace = cpu_trace(model, {"input_ids": IDS.to("meta")}, step, use_fused_kernels=True)
    assert any(said.startswith("fused kernels: ") for said in trace.assumptions)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
