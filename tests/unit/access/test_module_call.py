"""`ModuleCall`: what runs around a module's call, in which order, and what is left when it is removed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elixir.access.module_call import CALL, ModuleCall

ONES = torch.ones(2)


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Around:
    """Notes what begins and ends."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def run(self, name: str) -> Callable[..., Any]:
        def around(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.seen.append(f"{name} begins")
            try:
                return call(*args, **kwargs)
            finally:
                self.seen.append(f"{name} ends")

        return around


def test_hooks_run_inside_whenever_they_were_registered() -> None:
    module, around = Doubles(), Around()
    module.register_forward_pre_hook(lambda module, args: around.seen.append("before"))
    call = ModuleCall(module, around.run("call"))
    module.register_forward_hook(lambda module, args, output: around.seen.append("after"))
    assert module(ONES).tolist() == [2.0, 2.0]
    assert around.seen == ["call begins", "before", "after", "call ends"]
    call.remove()
    assert module(ONES).tolist() == [2.0, 2.0]
    assert around.seen[4:] == ["before", "after"]
    assert CALL not in vars(module)


def test_the_outermost_one_stays_around_those_that_come_later() -> None:
    module, around = Doubles(), Around()

    def seen() -> list[str]:
        around.seen.clear()
        module(ONES)
        return around.seen

    outer = ModuleCall(module, around.run("outer"), outermost=True)
    calls = [ModuleCall(module, around.run(name)) for name in ("first", "second")]
    both = [f"{name} begins" for name in ("outer", "second", "first")]
    assert seen() == [*both, *(f"{name} ends" for name in ("first", "second", "outer"))]
    calls[0].remove()  # the second one has called it
    assert seen() == ["outer begins", "second begins", "second ends", "outer ends"]
    for copied in (copy.copy(module), copy.deepcopy(module)):
        around.seen.clear()
        assert copied(ONES).tolist() == [2.0, 2.0]
        assert not around.seen
    calls[1].remove()
    assert seen() == ["outer begins", "outer ends"]
    outer.remove()
    assert seen() == []
    assert CALL not in vars(module)


def test_torch_calls_a_module_by_this_attribute() -> None:
    """It is private: should PyTorch give it up, this is where one sees it first."""
    assert vars(nn.Module)[CALL] is None
    module = Doubles()
    vars(module)[CALL] = lambda x: 3 * x
    assert module(ONES).tolist() == [3.0, 3.0]
