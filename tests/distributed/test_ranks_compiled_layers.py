"""Compiled layers on two ranks: losses and weights of DDP, loads and network bytes of the plan."""

from __future__ import annotations

import pytest
import torch

from tests.common.ddp import Twins
from tests.common.parity import case
from tests.common.spawn import run_ranks


def _train(rank: int, world_size: int, kind: str, checkpoint: str) -> None:
    it = case("llama", checkpoint)
    for layer in it.model.model.layers:
        layer.compile(backend="aot_eager")
    inp = {name: value[rank::world_size].contiguous() for name, value in it.inp.items()}
    twins = Twins(it.model, inp, kind, max_norm=0.5)
    assert twins.plan.step.units == ("model.layers.0", "model.layers.1")
    twins.train(4)
    twins.check()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    report = twins.module.last_report
    assert report is not None
    assert report.demand_loads == 0
    if kind == "host":
        for key in ("loads", "network"):
            assert report.observed[key] == report.predicted[key], key
    with torch.no_grad():
        twins.module.eval()
        twins.module(**inp)
    twins.close()


@pytest.mark.parametrize(("kind", "checkpoint"), [("host", "non-reentrant"), ("mixed", "none")])
def test_steps_are_those_of_ddp(kind: str, checkpoint: str) -> None:
    run_ranks(2, _train, kind, checkpoint)
