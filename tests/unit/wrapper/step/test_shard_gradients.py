"""The gradients of one shard, the writes to its weights, and the inputs of its updates, without a module around them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elixir.chunk.memory import Memory
from elixir.wrapper.step.elementwise import options_of
from elixir.wrapper.step.rules import AdamRule, EarlyUpdate, Inputs
from elixir.wrapper.step.update import can_share
from tests.common.one_shard import another, shard_of, states_of, weights_of


class Ticket:
    """Notes who waits for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.waits: list[str] = []
        self.error = error

    def wait(self) -> None:
        self.waits.append("compute")

    def synchronize(self) -> None:
        self.waits.append("this thread")


def filled_by(ticket: Any, tensor: torch.Tensor | None = None) -> Memory:
    memory = Memory() if tensor is None else Memory(tensor)
    memory.writer = ticket
    return memory


def inputs(factor: Any, *gradients: torch.Tensor, in_place: bool = True, **options: Any) -> Inputs:
    segments = shard_of(*weights_of(*(each.shape for each in gradients)))[1]
    arrived = list(zip(segments, gradients, strict=True))
    return Inputs(arrived, None, factor, [options], 0, 0, in_place)


@pytest.mark.parametrize("factor", [0.5, 1.0, torch.tensor(0.5)])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_multiplied_in_place_if_they_may_and_have_the_dtype(
    factor: Any, in_place: bool, dtype: torch.dtype
) -> None:
    gradients = [torch.ones(3, dtype=dtype), torch.ones(2, dtype=dtype)]
    left = inputs(factor, *gradients, in_place=in_place).multiplied(torch.float32).factor
    multiplied = in_place and dtype == torch.float32 and not (isinstance(factor, float) and factor == 1.0)
    assert [each.sum().item() for each in gradients] == ([1.5, 1.0] if multiplied else [3.0, 2.0])
    assert left == 1.0 if multiplied else left is factor
    assert inputs(factor, in_place=in_place).multiplied(torch.float32).factor is factor


@pytest.mark.parametrize(
    ("factor", "in_place", "dtype", "shares_call", "can"),
    [
        (1.0, False, torch.float32, True, True),
        (0.5, False, torch.float32, True, False),
        (0.5, True, torch.float32, True, True),
        (torch.tensor(1.0), False, torch.float32, True, False),
        (torch.tensor(1.0), True, torch.float32, True, True),
        (1.0, True, torch.bfloat16, True, False),
        (1.0, True, torch.float32, False, False),
    ],
)
def test_shards_share_a_call_if_no_gradient_is_copied(
    factor: Any, in_place: bool, dtype: torch.dtype, shares_call: bool, can: bool
) -> None:
    states, rule = SimpleNamespace(master=torch.ones(1)), SimpleNamespace(shares_call=shares_call)
    shard: Any = SimpleNamespace(states=states, rule=rule, chunk=SimpleNamespace(dtype=dtype))
    assert can_share(shard, inputs(factor, torch.ones(3), in_place=in_place)) is can


def early_of(after: Any = (), **options: Any) -> tuple[Any, Any, EarlyUpdate]:
    """Current states, other ones, and an early update from the ones into the others."""
    rule = AdamRule("float32", decoupled=True)
    old = states_of(rule)
    before = old.master.clone()
    new = another(old, rule)
    old.master.copy_(before)
    old.weights, new.weights = (torch.full((25,), value, dtype=torch.bfloat16) for value in (7.0, 0.0))
    arrived = [(each, torch.ones(each.slot.numel)) for each in old.segments]
    adam = options_of(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.5).param_groups[0])
    given = Inputs(arrived, None, 1.0, [adam | options] * 2, 0, 0)
    return old, new, EarlyUpdate(given, rule.step, old, new, tuple(filled_by(ticket) for ticket in after))


def test_an_early_update_computes_new_states_after_what_it_waits_for() -> None:
    released, forms = [], deque[str]()
    old, new, early = early_of([Ticket(), Ticket()], lr=2.0)
    before = old.master.clone()
    early.run(lambda: released.append(new.master.any()), forms)
    assert released == [False], "before anything is made"
    assert len(forms) == 1
    assert torch.equal(old.master, before)
    assert (before - new.master).tolist() == pytest.approx(
        [2.0 + 2.0 * 0.01 * each for each in before.tolist()], rel=1e-4
    )
    assert torch.equal(new.weights, new.master.bfloat16())
    *_, later = early_of([Ticket()])
    later.discard()
    later.run(None, forms)
    assert len(forms) == 1
