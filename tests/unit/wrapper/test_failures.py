"""A failure on a lane ends training, by name, and weights can be had all the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import StepError
from tests.common import gpu, inside
from tests.common.parity import Case, Pair, case, make_plan

NAMED = r"the optimizer step of chunk \d+ \(.*weight.*\) failed on the host with ValueError: broken"


class Breaking(torch.optim.SGD):
    """Raises in one step, if told to, after part of its work or before."""

    broken = False
    late = False

    def step(self, closure: Any = None) -> Any:
        if Breaking.broken and not Breaking.late:
            raise ValueError("broken")
        result = super().step(closure)
        if Breaking.broken:
            raise ValueError("broken")
        return result


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    Breaking.broken = Breaking.late = False
    yield
    Breaking.broken = Breaking.late = False


def make_pair(mode: str = "streamed", name: str = "cnn", **options: Any) -> Pair:
    it: Case = case(name)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        kind = Breaking if model is it.model else torch.optim.SGD
        return kind(model.parameters(), lr=0.1, momentum=0.9)

    return Pair(it, make_plan(it, mode), optimizer=sgd, **options)


def fail_a_step(pair: Pair, *, late: bool = False) -> dict[str, torch.Tensor]:
    """A step whose host part fails; the weights of before."""
    pair.train(1)
    before = pair.module.state_dict()
    Breaking.broken, Breaking.late = True, late
    pair.optimizer.backward(pair.case.loss(pair.module, pair.case.inp))
    pair.optimizer.step()
    for lane in inside.lanes(pair.module).all():
        lane.submit(lambda: None).synchronize()
    Breaking.broken = False
    return before


def same_weights(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> bool:
    """Whether weights are those of before; buffers are the forward's."""
    names = [name for name in before if name.endswith(("weight", "bias"))]
    return all(torch.equal(state[name], before[name]) for name in names)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_failed_ends_training_and_weights_are_there(late: bool) -> None:
    with make_pair(alike=False) as pair:
        before = fail_a_step(pair, late=late)
        for _ in range(2):
            with pytest.raises(StepError, match=NAMED) as raised:
                pair.module(**pair.case.inp)
        assert "training has ended" in str(raised.value)
        assert isinstance(raised.value.__cause__, StepError)
        assert isinstance(raised.value.__cause__.__cause__, ValueError)
        state = pair.module.state_dict()
        assert all(value.isfinite().all() for value in state.values())
        assert same_weights(state, before) is not late
        first = pair.module.module[0]
        assert torch.equal(first.weight + 0, state["0.weight"].to(first.weight.device)), "read outside of a forward"
        with pytest.raises(StepError, match=NAMED):
            pair.optimizer.step()


def test_a_model_is_given_back_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    with make_pair() as pair:
        before = fail_a_step(pair)
        with caplog.at_level(logging.ERROR):
            model = pair.module.release()
        assert "given back after an error" in caplog.text
        assert same_weights(model.state_dict(), before)
        pair.case.loss(model, gpu.there(pair.case.inp, "cpu")).backward()
