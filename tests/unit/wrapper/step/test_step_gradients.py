"""The gradients of one optimizer's next step: what counts as one, their loss scale, and what ranks agree on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper.step.gradient_norm import StepGradients


class Parts:
    """An optimizer over two of the three weights of a chunk, each in a group."""

    def __init__(self, size: int = 1, *, ordinary: bool = False, trainable: bool = True) -> None:
        self.weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
        self.held: set[str] = set()
        self.kept: list[set[str]] = []
        self.lost: list[Any] = []
        self.sent: list[Any] = []
        self.theirs: dict[str, Any] = {}
        slots = [SimpleNamespace(name=f"w{at}", parameter=weight) for at, weight in enumerate(self.weights)]
        chunk = SimpleNamespace(slots=slots, data_writes=3, plan=SimpleNamespace(trainable=trainable))
        self.engine: Any = SimpleNamespace(
            loss_scale=SimpleNamespace(value=8.0, used=True),
            plan=SimpleNamespace(world_size=size),
            group=SimpleNamespace(size=size),
            chunks=[chunk],
            is_ordinary=lambda chunk: ordinary,
            gradients=SimpleNamespace(
                by_chunk={0: SimpleNamespace(arrived={"w0"}), 1: SimpleNamespace(arrived=set())},
                holds=lambda chunk, name: name in self.held,
                hold=self.kept.append,
            ),
            errors=SimpleNamespace(of_disk="no error", agree=self.lost.append),
            holds_gradients=lambda: bool(self.held),
            exchange=self.exchange,
        )
        user: Any = SimpleNamespace(
            group_of={self.weights[0]: 0, self.weights[1]: 1}, options_to_compare=lambda limit: {"limit": str(limit)}
        )
        shards: Any = [SimpleNamespace(chunk=chunk)]
        self.gradients = StepGradients(self.engine, user, shards)

    def exchange(self, what: str, mine: Any) -> list[Any]:
        self.sent.append(what)
        return [mine, self.theirs.get(what, mine)]

    def set(self, *places: int) -> None:
        for place, weight in enumerate(self.weights):
            weight.grad = torch.ones(1) if place in places else None


@pytest.mark.parametrize(
    ("ordinary", "trainable", "requires_grad", "has_gradient", "error"),
    [
        (True, True, True, True, ""),
        (False, True, True, False, ""),
        (False, True, True, True, "the gradient of w0 was set by hand"),
        (True, False, True, False, "w0 was frozen when the model was planned"),
        (False, False, True, False, "w0 was frozen when the model was planned"),
        (False, False, False, True, ""),
    ],
)
def test_gradients_that_no_step_would_use_are_refused(
    ordinary: bool, trainable: bool, requires_grad: bool, has_gradient: bool, error: str
) -> None:
    parts = Parts(ordinary=ordinary, trainable=trainable)
    for weight in parts.weights:
        weight.requires_grad_(requires_grad)
    parts.set(*([0] if has_gradient else []))
    if not error:
        parts.gradients.refuse_unseen()
        return
    with pytest.raises(InputError, match=error):
        parts.gradients.refuse_unseen()


def test_ranks_use_what_any_of_them_has_and_need_the_same_options() -> None:
    parts = Parts(2)
    parts.held = {"w0"}
    parts.gradients.scaled(8.0)
    parts.gradients.agree(1.0, stepping=True)
    assert (parts.gradients.used, parts.kept, parts.lost) == ({"w0"}, [{"w0"}], [["no error"] * 2])
    assert parts.sent == ["gradients used"]
    mine: list[Any] = []
    parts.engine.exchange = lambda what, said: mine.append(said) or [said, said]
    parts.gradients.agree(1.0, stepping=True)
    ((flags, _, digest),) = mine
    assert list(flags) == [1, 0, 0, 0, 0]  # by weight, then whether they lack the loss scale, or are mixed
    parts.engine.exchange = parts.exchange
    parts.theirs["gradients used"] = (bytes([0, 1, 0, 0, 1]), None, digest)
    parts.gradients.agree(1.0, stepping=True)
    assert (parts.gradients.used, parts.gradients.are_mixed) == ({"w0", "w1"}, True)
    parts.theirs["gradients used"] = (bytes([0, 1, 0, 1, 0]), None, digest)
    with pytest.raises(InputError, match="these were made by loss"):
        parts.gradients.agree(1.0, stepping=True)
    parts.theirs["gradients used"] = (bytes(5), None, digest + 1)
    number = "the number of writes through .data of weights"
    parts.theirs["options"] = {"limit": "1.0", number: "4"}
    with pytest.raises(InputError, match=f"ranks step with different options: {number} is 3 on rank 0, 4 on rank 1"):
        parts.gradients.agree(1.0, stepping=True)
