"""Calls of a wrapped model on two ranks, each a thread: what every rank gets, and what an error on one does to both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elixir.errors import InputError
from tests.common import inside
from tests.common.audit import audit
from tests.common.parity import report_of, take_step
from tests.common.rank_threads import results
from tests.unit.wrapper.test_rank_threads import Rank, Situation, batch_of, loss_of, model_of, plan_of

HOMES = ("host", "device", "mixed")


def mean_gradients(numbers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss of both ranks, summed over the batches with these numbers."""
    model = model_of().eval()
    for number in numbers:
        for rank in range(2):
            (loss_of(model, batch_of(rank, number)) / 2).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return torch.cat([each.flatten() for each in gradients.values()]).norm().item()


@pytest.mark.parametrize("homes", HOMES)
def test_gradients_are_the_mean_and_their_norm_is_that_of_all(homes: str) -> None:
    once, twice = mean_gradients((0,)), mean_gradients((0, 1))

    def work(rank: int) -> None:
        run = Rank(Situation(homes=homes), rank)
        run.optimizer.backward(loss_of(run.module, batch_of(rank, 0)))
        assert run.module.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(once), rel=1e-5)
        run.optimizer.backward(loss_of(run.module, batch_of(rank, 1)))
        assert run.module.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(twice), rel=1e-5)
        with pytest.raises(InputError, match="norm_type is 1"):
            run.module.clip_grad_norm_(1.0, norm_type=1.0)
        run.module.zero_grad()
        assert run.module.clip_grad_norm_(1e9).item() == 0.0
        run.optimizer.backward(loss_of(run.module, batch_of(rank, 0)))
        assert run.module.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(once), rel=1e-5)
        run.optimizer.zero_grad()
        assert not inside.holds_gradients(run.module)
        audit(run.module)
        run.module.close()

    results(2, work)


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
