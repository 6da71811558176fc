"""New weights of low precision return to the device through two buffers in host memory: same bits, bytes as planned."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from elixir.chunk.host_buffers import STAGING
from elixir.optimizer_states import state_size
from elixir.plan.chunk_plan import Home
from elixir.plan.plan import Plan
from elixir.search.problem.placement import Placement, Setting
from elixir.search.propose.candidate import weigh
from elixir.search.propose.judge import Outcome
from elixir.search.propose.sizes import Budgets, SearchSpace
from elixir.search.propose.written_plan import to_plan
from elixir.search.request import SearchRequest
from elixir.search.simulator.replay import WorkSpan
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.chains import NUMEL, Speeds
from tests.common.parity import Case, case, hf_loss, make_plan, report_of, take_step
from tests.common.synthetic_trace import TraceBuilder
from tests.unit.wrapper.step.test_overlap import held, over, states_on_host
from tests.unit.wrapper.step.test_precision import Reference

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


@pytest.mark.sampled
@pytest.mark.parametrize("fused", [False, True])
def test_weights_are_their_masters_rounded(fused: bool) -> None:
    it = case("opt")
    reference = Reference(copy.deepcopy(it.model), BF16, 1.0, 0.0)
    module, optimizer = make_run(it, returning_plan(it), use_fused_kernels=fused)
    reference.step_like(module)
    for _ in range(5):
        loss, expected = step(module, optimizer, it), reference.step(it.inp)
        assert fused or torch.equal(loss, expected)
    module.settle()
    for chunk in inside.chunks(module):
        if chunk.plan.returns_rounded:
            assert chunk.masters is not None
            for slot in chunk.slots:
                part = slice(slot.offset, slot.offset + slot.numel)
                assert torch.equal(chunk.shard_weights[part].cpu(), chunk.masters[part].to(BF16)), slot.name


def test_the_host_keeps_what_the_plan_says() -> None:
    it = case("opt")
    plan = returning_plan(it)
    shards = [chunk.weight_bytes for chunk in plan.chunks if chunk.returns_rounded]
    module, optimizer = make_run(it, plan, use_fused_kernels=True)  # whose moments fill gaps between parameters, too
    step(module, optimizer, it)
    assert inside.bytes_by_kind(module, "host")["staging"] == 2 * max(shards)
    module.settle()  # moments are there when the first step is
    step(module, optimizer, it)
    report = report_of(module)
    assert report.observed["host_peak"] == report.predicted["host_peak"]


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


def chain(dtype: str, chunks: int) -> StepTrace:
    """Parameters of one chunk each, used one after the other and back."""
    build = TraceBuilder(dtype)
    numel = NUMEL * 4 // torch.finfo(getattr(torch, dtype)).bits * 8
    indices = [build.parameter(f"p{index}", numel) for index in range(chunks)]
    for phase in ("forward", "backward"):
        for index in indices if phase == "forward" else reversed(indices):
            build.use(phase, index, flops=NUMEL)
    return build.build("chain")


def simulated_lanes(dtype: str, chunks: int, speeds: Speeds) -> dict[str, list[WorkSpan]]:
    """Spans by resource of a step in which all weights are resident and all states on the host."""
    trace = chain(dtype, chunks)
    machine = speeds.machine()
    machine = replace(machine, flops_per_s=dict.fromkeys(("float32", "bfloat16"), machine.flops_per_s["float32"]))
    space = SearchSpace(trace, machine, Setting(1, 1, state_size("Adam"), True))
    model = space.model(1 << 20)
    homes = Placement((Home.RESIDENT_HOST,) * chunks)
    candidate = weigh(model, homes, 0, 0, space.cost)
    plan = to_plan(space, Outcome(candidate), Budgets(1 << 50, 1 << 50), SearchRequest(world_size=1))
    found = simulate_step(plan, trace, machine)
    return {name: [span for span in found.timeline if span.resource == name] for name in ("host_adam", "refresh")}


def test_simulated_updates_wait_for_a_buffer_where_weights_are_rounded() -> None:
    speeds = Speeds(use=0.01, fetch=4.0, adam=1.0)
    rounded, whole = (simulated_lanes(dtype, 5, speeds) for dtype in ("bfloat16", "float32"))
    returned = [span.end_s for span in rounded["refresh"]]
    starts = [span.start_s for span in rounded["host_adam"]]
    assert starts[2:] == pytest.approx(returned[:-2])
    ends = [span.end_s for span in whole["host_adam"]]
    assert [span.start_s for span in whole["host_adam"]][1:] == pytest.approx(ends[:-1])
