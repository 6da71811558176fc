"""Calls after `close`, inside of a forward, and after a backward that has raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elixir.checkpoint import save_checkpoint
from elixir.errors import InputError
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
