"""Seconds of plans whose matrices are stepped whole: the device makes them orthogonal wherever their states live."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elixir.search import plan_from_trace
from elixir.search.simulator.rates import Rates, main_dtype
from elixir.search.simulator.simulation import simulate_step
from elixir.units import GIB
from tests.common.samples import make_hardware
from tests.common.synthetic_trace import StackShape, stack_trace

STACK = stack_trace(StackShape(hidden=256, layers=4, ffn=1024, vocab=2048, positions=256), batch=2, seq=256)
HARDWARE = replace(make_hardware(), flops_per_s={"bfloat16": 9e13, "float32": 4e13}, host_memory_bytes=512 * GIB)


@pytest.mark.parametrize("placement", ["cpu", "cuda"])
def test_a_step_takes_the_products_of_all_matrices_and_its_compute(placement: str) -> None:
    plan = plan_from_trace(
        STACK, HARDWARE, 1, optimizer_type="Muon", placement=placement, device_memory=GIB, host_budget=GIB
    ).plan
    assert {chunk.state_home for chunk in plan.chunks if chunk.matrices} == {"host" if placement == "cpu" else "device"}
    rates = Rates(HARDWARE, main_dtype(STACK), 1, 1)
    products_s = sum(rates.orthogonal_s(chunk.matrices) for chunk in plan.chunks)
    found = simulate_step(plan, STACK, HARDWARE)
    assert products_s > 0
    assert found.busy_s["compute"] >= (products_s + float(rates.accesses_s(STACK).sum())) * (1 - 1e-9)
    assert sum(span.end_s - span.start_s for span in found.timeline if span.resource == "compute") == pytest.approx(
        found.busy_s["compute"]
    )
