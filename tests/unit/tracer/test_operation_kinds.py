"""Operators are told apart by what bounds them, and costs are kept one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elixir.hardware.profile import preset
from elixir.step_trace import Operation, StepTrace
from elixir.tracer.compiled.compiled_layers import FusedCosts
from elixir.tracer.ledger import StorageRecord
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


def test_every_operator_keeps_its_kind_flops_and_bytes() -> None:
    trace = block_trace()
    found = {operation.kind for operation in trace.operations}
    assert {"reduction", "activation", "elementwise"} < found
    product = 2 * 256 * 128 * 512
    read_or_written = 256 * 128 + 128 * 512 + 256 * 512
    products = {(operation.flops, operation.moved_bytes) for operation in trace.operations if operation.flops}
    assert products == {(product, 4 * (read_or_written + bias)) for bias in (512, 0)}
    forward = [event for event in trace.accesses if event.phase == "forward"]
    assert sum(trace.operations[index].flops for event in forward for index in event.operations) == product
    assert all(not operation.flops for operation in trace.operations if operation.kind == "elementwise")


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


def test_a_compiled_layer_reads_and_writes_what_its_kernels_cannot_hold() -> None:
    """Records of 1, 2, 4, ... bytes: a sum of moved bytes says which of them are read or written."""
    records = [StorageRecord(index, 1 << index, "activations", "", None) for index in range(9)]
    plain, product = Operation("elementwise", "float32", 0, 999), Operation("square", "float32", 7, 888)
    steps = [
        # phase, module, operator, records that it reads and makes, bytes of what is yielded
        ("forward", "", plain, [0], [1], [999]),
        ("forward", "layers.0.up", plain, [0], [1], [1]),
        ("forward", "layers.0", plain, [0, 1], [2], []),  # read before by this kernel, or made by it
        ("forward", "layers.0", product, [2, 8], [3], [4, 888]),  # the kernel before it writes what it reads
        ("forward", "layers.0", plain, [3, 0, 2], [4, 5], [8 + 1 + 4]),
        ("forward", "layers.0", product, [2], [], [888]),  # written already
        ("forward", "layers.1", plain, [4], [], [32, 16]),  # another layer: the last writes its largest result
        ("forward", "layers.1", product, [7], [6], [888]),
        ("backward", "layers.1", plain, [6], [7], [64]),  # nothing is left to write
        ("backward", "layers.1", product, [7], [], [128, 888]),
        ("backward", "", plain, [], [], [999]),  # nor here, where the product has taken it
        ("backward", "layers.1", plain, [], [], []),
    ]
    fused = FusedCosts(["layers.0", "layers.1"])
    for number, (phase, module, operation, reads, makes, expected) in enumerate(steps):
        read, made = ([*map(records.__getitem__, each), None] for each in (reads, makes))
        found = [each.moved_bytes for each in fused.of(phase, module, operation, read, made)]
        assert found == expected, (number, found)
