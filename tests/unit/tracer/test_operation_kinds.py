"""Operators are told apart by what bounds them, and costs are kept one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elixir.step_trace import StepTrace
from elixir.tracer.operation_kinds import product_class
from tests.common.tracing import cpu_trace


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((1024, 1024, 1024), "square"),
        ((8192, 1024, 1024), "tall"),
        ((1024, 1024, 8192), "tall"),
        ((1024, 8192, 1024), "deep"),
        ((16, 4096, 4096), "skinny"),
        ((4096, 4096, 16), "skinny"),
        ((2048, 1024, 1024), "square"),
    ],
)
def test_products_have_the_class_of_the_measured_one(dims: tuple[int, int, int], expected: str) -> None:
    assert product_class(*dims) == expected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.wide = nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.wide(self.norm(x))) + 1.0


def block_trace() -> StepTrace:
    return cpu_trace(Block(), {"x": torch.ones(256, 128)}, lambda model, inp: model(inp["x"]).sum().backward())


def test_every_operator_keeps_its_kind_flops_and_bytes() -> None:
    trace = block_trace()
    found = {operation.kind for operation in trace.operations}
    assert {"reduction", "activation", "elementwise"} < found
    product = 2 * 256 * 128 * 512
    read_or_written = 256 * 128 + 128 * 512 + 256 * 512
    products = {(operation.flops, operation.moved_bytes) for operation in trace.operations if operation.flops}
    assert products == {(product, 4 * (read_or_written + bias)) for bias in (512, 0)}
    forward = [event for event in trace.accesses if event.phase == "forward"]
    assert sum(trace.access_flops(event) for event in forward) == product
    assert all(not operation.flops for operation in trace.operations if operation.kind == "elementwise")
    assert trace.flops == sum(trace.access_flops(event) for event in trace.accesses)


def test_allocations_cost_nothing() -> None:
    def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        torch.empty(10**6, device=inp["x"].device)
        model(inp["x"]).sum().backward()

    more = cpu_trace(Block(), {"x": torch.ones(256, 128)}, step)
    assert more.operations == block_trace().operations
