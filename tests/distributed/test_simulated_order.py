"""Several ranks load, reduce and offload in the order that the step simulator replays."""

from __future__ import annotations

import pytest

from elixir.hardware.profile import preset
from elixir.tracer.trace import trace_step
from tests.common.ddp import Twins, batch_of, hf_loss
from tests.common.spawn import run_ranks
from tests.common.submitted import simulated_events, watching
from tests.common.tiny_models import tiny


def _orders(rank: int, world_size: int, family: str, kind: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    model = tiny(family)
    inp = batch_of(model, rank, world_size)
    trace = trace_step(model, inp, lambda m, i: hf_loss(m, i).backward(), hardware=preset("cpu"), optimizer=None)
    twins = Twins(model, inp, kind)
    twins.train(1)
    with watching() as seen:
        twins.backward()
    twins.close()
    return seen, simulated_events(twins.plan, trace, preset("cpu"))


@pytest.mark.parametrize(("family", "kind"), [("opt", "host"), ("opt", "mixed"), ("t5", "device")])
def test_events_come_in_the_order_of_the_runtime(family: str, kind: str) -> None:
    for seen, expected in run_ranks(2, _orders, family, kind):
        assert seen == expected
