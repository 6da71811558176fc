"""New weights of low precision return to the device through two buffers in host memory: same bits, bytes as planned."""

from __future__ import annotations

from typing import Any

import torch

from elixir.chunk.host_buffers import STAGING
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.parity import Case, case, hf_loss, make_plan, take_step
from tests.unit.wrapper.step.test_overlap import held, over, states_on_host

BF16 = torch.bfloat16


def make_run(it: Case, plan: Plan, **options: Any) -> tuple[ElixirModule, ElixirOptimizer]:
    module = ElixirModule(it.model, plan, dtype=BF16, device=gpu.DEVICE, debug=Debug(poison=True), **options)
    return module, ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1))


def step(module: ElixirModule, optimizer: ElixirOptimizer, it: Case) -> torch.Tensor:
    loss = hf_loss(module, it.inp)
    take_step(optimizer, loss)
    return loss.detach()


def returning_plan(it: Case) -> Plan:
    """All weights resident in bfloat16, all states on the host."""
    return states_on_host(make_plan(it, "resident", unified_dtype=BF16))


@gpu.on_the_cpu("holds a lane's thread")
def test_a_buffer_is_not_written_to_before_its_weights_have_left() -> None:
    it = case("opt", layers=1)
    module, optimizer = make_run(it, returning_plan(it))
    step(module, optimizer, it)
    module.settle()
    optimizer.backward(hf_loss(module, it.inp))
    lanes = inside.lanes(module)
    with held(lanes.refresh):
        optimizer.step()
        second = [part.chunk for part in inside.shards(module) if part.chunk.plan.returns_rounded][1]
        idle = lanes.host_adam.submit(lambda: None)
        assert not idle.done()
        stepped = [ticket for stage in inside.host_buffers(module, STAGING) for ticket in stage.readers.values()]
        assert stepped
        assert not any(ticket.done() for ticket in stepped)
        assert second.at_home.writer
    assert over(idle)
