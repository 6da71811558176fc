"""Calls after `close`, inside of a forward, and after a backward that has raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elixir.checkpoint import save_checkpoint
from elixir.errors import InputError
from elixir.wrapper.phase import Phase
from tests.common import inside
from tests.common.parity import Case, Pair, make_plan, square_loss


def _made(**step: Any) -> Pair:
    it = Case(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"input": torch.ones(2, 4)}, square_loss)
    return Pair(it, make_plan(it, "streamed", split_number=1, **step), device="cpu", poison=False)


@pytest.fixture(scope="module")
def closed() -> Pair:
    pair = _made()
    pair.state = pair.optimizer.state_dict()  # type: ignore[attr-defined]
    pair.module.close()
    return pair


@pytest.fixture(scope="module")
def opened() -> Iterator[Pair]:
    with _made() as pair:
        pair.state = pair.optimizer.state_dict()  # type: ignore[attr-defined]
        yield pair


def _gathered(pair: Pair) -> None:
    with pair.module.gathered():
        pass


CALLS: dict[str, Callable[[Any], object]] = {
    "backward": lambda pair: pair.optimizer.backward(torch.ones((), requires_grad=True)),
    "forward": lambda pair: pair.module(**pair.case.inp),
    "step": lambda pair: pair.optimizer.step(),
    "accumulate": lambda pair: pair.optimizer.accumulate(lambda module, _: module(**pair.case.inp), [1]),
    "no_sync": lambda pair: pair.module.no_sync(),
    "gathered": _gathered,
    "rehome": lambda pair: pair.module.rehome(pair.plan),
    "settle": lambda pair: pair.module.settle(),
    "to": lambda pair: pair.module.to(torch.float64),
    "state_dict": lambda pair: pair.module.state_dict(),
    "load_state_dict": lambda pair: pair.module.load_state_dict(pair.plain.state_dict()),
    "clip_grad_norm_": lambda pair: pair.module.clip_grad_norm_(1.0),
    "clip_grad_norm_ of the optimizer": lambda pair: pair.optimizer.clip_grad_norm_(1.0),
    "state_dict of the optimizer": lambda pair: pair.optimizer.state_dict(),
    "load_state_dict of the optimizer": lambda pair: pair.optimizer.load_state_dict(pair.state),
    "state.clear of the optimizer": lambda pair: pair.optimizer.state.clear(),
    "save_checkpoint": lambda pair: save_checkpoint("never", {"model": pair.module, "optimizer": pair.optimizer}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_after_the_end_is_refused(name: str, closed: Pair) -> None:
    with pytest.raises(InputError, match="closed"):
        CALLS[name](closed)


OUTSIDE = {name: call for name, call in CALLS.items() if "state" in name or name in ("gathered", "rehome")}
OUTSIDE |= {"close": lambda pair: pair.module.close(), "save_checkpoint": CALLS["save_checkpoint"]}
del OUTSIDE["state_dict"]  # reads weights, which may be done at any time


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_call_inside_of_a_forward_is_refused(name: str, opened: Pair) -> None:
    handle = opened.module.module[0].register_forward_hook(lambda *_: OUTSIDE[name](opened))
    with pytest.raises(InputError, match="is for outside of the model's forward and backward"):
        opened.module(**opened.case.inp)
    handle.remove()
    opened.train(1)


def _fails(*_: object) -> None:
    raise ZeroDivisionError


def _fail_backward(pair: Pair) -> None:
    """A backward of both models that has given the last layer its gradients, and no others."""
    for model, first, backward in (
        (pair.module, pair.module.module[0], pair.optimizer.backward),
        (pair.plain, pair.plain[0], torch.Tensor.backward),  # type: ignore[index]
    ):
        handle = first.register_forward_hook(lambda _module, _args, output: output.register_hook(_fails) and None)
        loss = pair.case.loss(model, pair.case.inp)
        handle.remove()
        with pytest.raises(ZeroDivisionError):
            backward(loss)


def _norm(pair: Pair) -> None:
    plain = nn.utils.clip_grad_norm_(pair.plain.parameters(), 1e-3)
    assert float(pair.optimizer.clip_grad_norm_(1e-3)) == pytest.approx(float(plain))


def _step(pair: Pair) -> None:
    pair.optimizer.step()
    pair.plain_optimizer.step()


AFTER_FAILURE: dict[str, Callable[[Pair], object]] = {
    "clip_grad_norm_": _norm,
    "step": _step,
    "zero_grad": lambda pair: pair.optimizer.zero_grad(),
    "settle": lambda pair: pair.module.settle(),
    "gathered": _gathered,
    "forward": CALLS["forward"],
    "state_dict of the optimizer": CALLS["state_dict of the optimizer"],
}


@pytest.mark.parametrize("name", AFTER_FAILURE)
def test_a_call_after_a_backward_that_raised_ends_it(name: str, opened: Pair) -> None:
    _fail_backward(opened)
    assert inside.phase(opened.module) is Phase.BACKWARD
    AFTER_FAILURE[name](opened)
    assert inside.phase(opened.module) is Phase.IDLE
    if name != "zero_grad":  # its gradients count
        _step(opened)
        opened.assert_same_weights()
    opened.optimizer.zero_grad()
    opened.plain_optimizer.zero_grad()
    opened.train(1)


STATES: dict[str, Callable[[Any], object]] = {
    "get": lambda states: states[0],
    "set": lambda states: states.__setitem__(0, {}),
    "delete": lambda states: states.__delitem__(0),
    "length": len,
    "iterate": list,
    "contains": lambda states: 0 in states,
}


@pytest.mark.parametrize("name", STATES)
def test_states_in_shards_are_not_shown_as_a_dict(name: str, opened: Pair) -> None:
    opened.train(1)
    with pytest.raises(InputError, match=r"lie in shards.*state_dict\(\)"):
        STATES[name](opened.optimizer.state)


def test_there_are_no_states_before_the_first_step_or_after_they_were_cleared() -> None:
    with _made() as pair:
        states = pair.optimizer.state
        for _ in range(2):
            assert (len(states), list(states), 0 in states) == (0, [], False)
            pair.train(1)
            states.clear()
            pair.plain_optimizer.state.clear()
        pair.train(1)
