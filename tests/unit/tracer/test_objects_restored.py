"""Changes that user code makes are put back without a trace, too."""

from __future__ import annotations

import functools
import importlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import packaging.version
import pytest
import torch
from torch import nn

from elixir.tracer.user_objects import MOST_ENTRIES, user_objects_restored
from tests.common import inside
from tests.unit.tracer import test_user_objects
from tests.unit.tracer.test_user_objects import INP, LOSSES, Meter, Owner, by_name


def run(*steps: Callable[[nn.Module, dict[str, Any]], None]) -> None:
    """Runs steps of a model, and puts back what they change of all but the model."""
    model, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    with user_objects_restored(model, twin, *steps, INP, writes_unseen=True):
        for step in steps:
            step(twin, INP)


def test_an_owner_and_names_are_as_before() -> None:
    owner = Owner()
    before, count = owner.read(), test_user_objects.COUNT
    run(owner.step, by_name)
    assert owner.read() == before
    assert (test_user_objects.COUNT, LOSSES, hasattr(test_user_objects, "NEW")) == (count, [], False)


class Listed(list[Any]):
    """A list with an attribute."""

    total = 0


class Closed(type):
    """A class that takes no attributes back."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "count" and value == 0:
            raise AttributeError("closed")
        super().__setattr__(name, value)


class Shut(metaclass=Closed):
    count = 0


class Base:
    count = 0
    found: ClassVar[list[int]] = []


class Derived(Base):
    """Has an attribute of the class that it derives from."""


class Locked:
    """Belongs to the user, and holds what threads wait for."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[Any] = queue.Queue()
        self.lock = threading.Lock()
        self.count = 0


def test_classes_modules_and_containers_of_the_user_are_as_before_and_queues_keep_what_they_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "counters_of_a_user.py").write_text("count = 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    counters = importlib.import_module("counters_of_a_user")
    monkeypatch.setitem(globals(), "COUNTERS", counters)
    listed, locked, held = Listed([1]), Locked(), torch.zeros(4)
    waiting, calls = locked.waiting, Meter.calls
    objects, fixed, large = np.array([1, 2], dtype=object), np.arange(3.0), np.zeros(8 * MOST_ENTRIES)
    fixed.flags.writeable = False
    inner: list[int] = []
    call = functools.partial(lambda item, into: into.append(item), into=inner)
    wide, derived, version = np.zeros(20_000), Derived(), packaging.version.Version("1")

    for one in (version, waiting):  # classes of packages and of Python are left alone
        monkeypatch.setattr(type(one), "seen", False, raising=False)

    def step(model: nn.Module, inp: dict[str, Any], *, kept: list[Any] = [3]) -> None:  # noqa: B006
        model(inp["x"]).sum().backward()
        kept.append(wide)
        wide[0] = 1
        type(derived).__bases__[0].count += 1
        Base.found.append(1)
        call(2)
        for one in (version, waiting):
            type(one).seen = True  # type: ignore[attr-defined]
        COUNTERS.count += 1  # type: ignore[name-defined]  # noqa: F821
        Meter.added = 1  # type: ignore[attr-defined]
        Meter.calls += 1
        Shut.count += 1
        listed.append(2)
        listed.total = 5
        locked.count += 1
        waiting.put(1)
        held.add_(1)
        held.resize_(8)
        objects[0] = fixed[1]
        large[0] = 1

    run(step)
    assert (counters.count, hasattr(Meter, "added"), Meter.calls) == (0, False, calls)
    assert (listed, listed.total, locked.count) == ([1], 0, 0)
    assert (step.__kwdefaults__, wide[0], Base.count) == ({"kept": [3]}, 0, 0)
    assert (Base.found, inner) == ([], [])
    assert waiting.qsize() == 1
    assert [one.seen for one in (version, waiting)] == [True, True]  # type: ignore[attr-defined]
    assert held.shape == (8,)
    assert (objects[0], large[0]) == (1, 1)  # arrays of objects and those that are too large are not copied
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "something that the trace has changed could not be put back"
    ]


def test_names_of_a_notebook_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module has no file, as has one of Python's own."""
    inside.forget_whose_modules_are(monkeypatch)
    monkeypatch.delattr("__main__.__file__", raising=False)
    counts = []
    for module in ("__main__", "builtins"):
        names: dict[str, Any] = {"__name__": module, "count": 0}
        exec("def step():\n    global count\n    count += 1", names)
        with user_objects_restored(nn.Linear(1, 1), nn.Linear(1, 1), names["step"]):
            names["step"]()
        counts.append(names["count"])
    assert counts == [0, 1]
