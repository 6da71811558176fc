"""Calls of a wrapped model on two ranks, each a thread: what every rank gets, and what an error on one does to both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.common.audit import audit
from tests.common.parity import report_of, take_step
from tests.common.rank_threads import results
from tests.unit.wrapper.test_rank_threads import Rank, Situation, batch_of, loss_of, model_of, plan_of

HOMES = ("host", "device", "mixed")


def test_an_overflow_on_one_rank_leaves_out_the_step_on_both() -> None:
    plan = plan_of(2, "host", torch.float32, unified_dtype=torch.float16)

    def work(rank: int) -> list[float]:
        run = Rank(Situation(homes="host"), rank, plan)
        optimizer = run.optimizer
        scales = []
        for number in range(3):
            before = run.weights()
            loss = loss_of(run.module, batch_of(rank, number))
            take_step(optimizer, loss * float("inf") if number == rank == 1 else loss)
            scales.append(optimizer.loss_scale)
            same = all(torch.equal(each, before[name]) for name, each in run.weights().items())
            assert same == (number == 1)
            report = report_of(run.module)
            assert report.observed["device_to_host"] == report.predicted["device_to_host"]
        run.module.close()
        return scales

    one, two = results(2, work)
    assert one == two
    assert one[1] == one[0] / 2 == one[2]


@pytest.mark.parametrize("homes", HOMES)
def test_gathered_weights_are_whole_and_what_rank_0_writes_is_that_of_all(homes: str) -> None:
    expected = model_of().state_dict()

    def work(rank: int) -> None:
        run = Rank(Situation(homes=homes), rank)
        inner: Any = run.module.module
        with run.module.gathered([inner[2].weight]):
            assert torch.equal(inner[2].weight, expected["2.weight"])
        with run.module.gathered(run.module):
            assert all(torch.equal(each, expected[name]) for name, each in inner.named_parameters())
        with run.module.gathered([inner[2].weight, inner[4].bias], write=True), torch.no_grad():
            inner[2].weight.fill_(3.0)
            inner[4].bias.add_(1.0)
        found = run.module.state_dict()
        changed = {"2.weight": torch.full_like(expected["2.weight"], 3.0), "4.bias": expected["4.bias"] + 1}
        assert all(torch.equal(found[name], changed.get(name, expected[name])) for name in expected)
        audit(run.module)
        run.step(0)
        run.module.close()

    results(2, work)
