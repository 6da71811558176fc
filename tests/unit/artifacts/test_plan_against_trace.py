"""A plan that keeps everything on one device needs what the trace says plain PyTorch needs, and its states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elixir.hardware.profile import preset
from elixir.models.step import default_input, default_step
from elixir.search import plan_from_trace
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from tests.common.tiny_models import FAMILIES, tiny


class Repeated(nn.Module):
    """One weight used several times, so that autograd sums its gradient up over several nodes."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def squares(model: nn.Module, inp: dict[str, Any]) -> None:
    model(inp["x"]).pow(2).mean().backward()


def planned_without_states(trace: StepTrace) -> int:
    """Device peak of the plan with everything resident, optimizer states not counted."""
    plan = plan_from_trace(
        trace, preset("cpu"), 1, placement="cuda", device_memory="64GiB", host_budget="64GiB", overlap=False
    ).plan
    return plan.predicted.device_peak_bytes - plan.predicted.device_parts["optimizer_states"]


@pytest.mark.parametrize("times", [1, 2, 6])
@pytest.mark.parametrize("batch", [4, 512])
def test_a_weight_used_several_times_is_planned_at_its_peak(times: int, batch: int) -> None:
    trace = trace_step(Repeated(times), {"x": torch.ones(batch, 256)}, squares, hardware=preset("cpu"), optimizer=None)
    assert planned_without_states(trace) >= trace.backward_peak_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resident_plan_needs_no_less_than_plain_pytorch(family: str, checkpoint: str) -> None:
    model = tiny(family, checkpoint=checkpoint, device="meta")
    trace = trace_step(model, default_input(model, batch=2), default_step, hardware=preset("cpu"), optimizer=None)
    assert planned_without_states(trace) >= trace.backward_peak_bytes
