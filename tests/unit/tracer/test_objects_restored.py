"""Changes that user code makes are put back without a trace, too."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import packaging.version
import torch
from torch import nn

from elixir.tracer.user_objects import user_objects_restored
from tests.unit.tracer.test_user_objects import INP, Owner


def run(*steps: Callable[[nn.Module, dict[str, Any]], None]) -> None:
    """Runs steps of a model, and puts back what they change."""
    model = nn.Linear(4, 4)
    with user_objects_restored(model, *steps, INP, writes_unseen=True):
        for step in steps:
            step(model, INP)


def test_an_owner_is_as_before() -> None:
    owner = Owner()
    before = owner.read()
    run(owner.step)
    assert owner.read() == before


class Listed(list[Any]):
    """A list with an attribute."""

    total = 0


class Locked:
    """Belongs to the user, and holds what threads wait for."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[Any] = queue.Queue()
        self.lock = threading.Lock()
        self.count = 0


class Slotted:
    """Is not looked into."""

    __slots__ = ("count",)


def test_containers_of_the_user_are_as_before_and_queues_keep_what_they_got() -> None:
    listed, locked, held = Listed([1]), Locked(), torch.zeros(4)
    waiting, version, slotted = locked.waiting, packaging.version.Version("1"), Slotted()
    inner: list[int] = []
    call = functools.partial(lambda item, into: into.append(item), into=inner)

    def step(model: nn.Module, inp: dict[str, Any], *, kept: list[Any] = [3]) -> None:  # noqa: B006
        model(inp["x"]).sum().backward()
        kept.append(version)
        call(2)
        slotted.count = 1
        listed.append(2)
        listed.total = 5
        locked.count += 1
        waiting.put(1)
        held.add_(1)
        held.resize_(8)

    run(step)
    assert (listed, listed.total, locked.count) == ([1], 0, 0)
    assert (step.__kwdefaults__, inner) == ({"kept": [3]}, [])
    assert (waiting.qsize(), slotted.count) == (1, 1)
    assert held.shape == (8,)
