"""Operators are told apart by what bounds them, and costs are kept one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elixir.hardware.profile import preset
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from tests.common.tracing import cpu_trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.wide = nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.wide(self.norm(x))) + 1.0


def block_trace() -> StepTrace:
    return cpu_trace(Block(), {"x": torch.ones(256, 128)}, lambda model, inp: model(inp["x"]).sum().backward())


@pytest.mark.parametrize("hardware", ["h200", "cpu"])
def test_backward_of_attention_is_a_kind_of_its_own(hardware: str) -> None:
    def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        x = model(inp["x"]).unflatten(-1, (4, 32)).transpose(1, 2)
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()

    trace = trace_step(
        nn.Linear(128, 128), {"x": torch.ones(2, 64, 128)}, step, hardware=preset(hardware), dtype=torch.bfloat16
    )
    attention = {operation.kind: operation.flops for operation in trace.operations if "attention" in operation.kind}
    assert attention["attention_backward"] == 2.5 * attention["attention"] > 0


def test_allocations_cost_nothing() -> None:
    def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        torch.empty(10**6, device=inp["x"].device)
        model(inp["x"]).sum().backward()

    more = cpu_trace(Block(), {"x": torch.ones(256, 128)}, step)
    assert more.operations == block_trace().operations
