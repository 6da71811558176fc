"""Whatever a trace runs leaves the user's objects as they were."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elixir
from elixir.errors import TraceError
from elixir.tracer import user_objects
from elixir.tracer.user_objects import user_objects_restored
from tests.common.tracing import CPU, H200, cpu_trace, sum_step

INP = {"x": torch.ones(2, 4)}


class Meter:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values = [1.0]

    def add(self, value: Any) -> None:
        self.last = value
        self.values.append(value)


@dataclasses.dataclass
class Tokens:
    seen: int = 0


class Owner:
    """Owns everything that a step changes, as a trainer does."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {"train": collections.defaultdict(list)}
        self.recent = collections.deque([1], maxlen=2)
        self.order = collections.OrderedDict(a=1, b=2)
        self.names = {"x"}
        self.pairs = [({"loss": 1.0}, [2.0])]
        self.state = types.SimpleNamespace(step=0)
        self.meter, self.tokens = Meter(), Tokens()
        self.total = torch.arange(3.0)
        self.norm = nn.BatchNorm1d(4)
        self.draws = [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)]
        self.weights = {"best": None}
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def step(self, model: nn.Module, inp: dict[str, Any]) -> None:
        loss = model(inp["x"]).sum()
        loss.backward()
        number = loss.item()
        self.metrics["train"]["loss"].append(number)
        self.recent.append(number)
        self.order.move_to_end("a")
        self.names.symmetric_difference_update({"x", "y"})  # as many as before
        self.pairs[0][0]["loss"] = number
        self.pairs[0][1].append(number)
        self.state.step += 1
        self.meter.add(number)
        self.tokens.seen += inp["x"].numel()
        self.total.add_(1)
        self.total[0] = 7
        self.norm(torch.randn(3, 4))
        self.draws[0].random(), self.draws[1].random(), torch.rand(1, generator=self.draws[2])
        self.scheduler.step()
        self.loss = loss
        self.weights = {"best": model}
        if self.state.step > 9:
            raise ValueError("no")

    def read(self) -> Any:
        return repr(
            (
                self.metrics, self.recent, self.order, self.names, self.pairs, self.state, self.meter.values,
                hasattr(self.meter, "last"), self.tokens, self.total, self.norm.state_dict(),
                self.draws[0].getstate(), self.draws[1].bit_generator.state, self.draws[2].get_state().tolist(),
                self.weights, sorted(vars(self)), self.scheduler.state_dict(), self.optimizer.state_dict(),
            )
        )  # fmt: skip


@pytest.mark.parametrize("hardware", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("steps", [0, 9], ids=["works", "raises"])
def test_what_a_step_changes_on_its_owner_is_as_before(steps: int, hardware: Any) -> None:
    owner = Owner()
    owner.state.step = steps
    before, metrics = owner.read(), owner.metrics["train"]
    if steps:
        with pytest.raises(TraceError, match="ValueError: no"):
            cpu_trace(nn.Linear(4, 4), INP, owner.step, hardware=hardware)
    else:
        cpu_trace(nn.Linear(4, 4), INP, owner.step, hardware=hardware)
    assert owner.read() == before
    assert owner.metrics["train"] is metrics
    owner.state.step = 0
    owner.step(nn.Linear(4, 4), INP)  # and it changes them in a real step
    assert owner.read() != before


def test_closures_defaults_and_attributes_of_functions_are_as_before() -> None:
    losses: list[Any] = []
    count = 0

    def step(model: nn.Module, inp: dict[str, Any], kept: list[Any] = [3]) -> None:  # noqa: B006
        nonlocal count
        count += 1
        losses.append(count)
        kept.append(count)
        step.calls += 1  # type: ignore[attr-defined]
        sum_step(model, inp)

    step.calls = 0  # type: ignore[attr-defined]

    def logs(model: nn.Module, inp: dict[str, Any], into: list[Any]) -> None:
        step(model, inp)
        into.append(1)

    given: list[Any] = []
    cpu_trace(nn.Linear(4, 4), INP, functools.partial(logs, into=given))
    assert (losses, count, given, step.__defaults__) == ([], 0, [], ([3],))
    assert step.calls == 0  # type: ignore[attr-defined]


class Counts(nn.Module):
    """Counts its forwards on itself and in a function that it holds, and makes parts, buffers and weights anew."""

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.note, self.history, self.calls = note, list[Any](), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.layer(x)
        self.history.append(y)
        self.last = y
        self.note(y)
        self.register_buffer("seen", y.detach())
        self.part = nn.Identity()
        self.extra = nn.Parameter(torch.ones(4, device=x.device))
        self.layer.register_forward_hook(lambda *_: None)
        return y


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_is_as_before(device: str) -> None:
    noted: list[Any] = []
    model = Counts(noted.append if device == "cpu" else lambda y: noted.append(y)).to(device)
    cpu_trace(model, INP, lambda m, i: m(i["x"]).sum().backward())
    assert (model.calls, model.history, noted) == (0, [], [])
    assert not any(hasattr(model, name) for name in ("last", "seen", "part", "extra"))
    assert not model.layer._forward_hooks


def test_a_step_that_wrap_traces_leaves_no_number_in_a_list() -> None:
    losses: list[float] = []

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        loss = model(inp["x"]).sum()
        loss.backward()
        losses.append(loss.item())

    model = nn.Linear(4, 4)
    wrapped, _ = elixir.wrap(model, torch.optim.AdamW(model.parameters()), inp=INP, step_fn=step)
    assert losses == []
    step(wrapped, INP)
    assert [type(loss) for loss in losses] == [float]
    wrapped.close()


def test_a_counter_is_put_back_although_data_are_too_many_to_be_looked_into(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner()
    owner.data = [{"ids": [1, 2, 3]} for _ in range(1000)]  # type: ignore[attr-defined]
    before = owner.read()
    for most, step in ((4000, owner.step), (10, lambda m, i: (owner, m(i["x"]).sum().backward()))):
        assert not caplog.records
        monkeypatch.setattr(user_objects, "MOST_ENTRIES", most)
        cpu_trace(nn.Linear(4, 4), INP, step)
        assert owner.read() == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "torch.utils.data.Dataset" in caplog.text


@pytest.mark.parametrize("make", [lambda: list(range(1000)), lambda: [[1] for _ in range(1000)], dict])
def test_wide_data_next_to_a_list_do_not_keep_it_from_being_put_back(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_objects, "MOST_ENTRIES", 400)
    data, losses = make(), list[Any]()

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        losses.append(len(data))
        model(inp["x"]).sum().backward()

    cpu_trace(nn.Linear(4, 4), INP, step)
    assert losses == []


class Proxy:
    """Raises when it is asked for its class, as one outside of its context does."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("working outside of a context")


class Late(types.ModuleType):
    """Loads its names when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        vars(self)[name] = value = [name]
        return value


def test_proxies_and_modules_that_load_late_are_left_alone() -> None:
    proxy, late, losses = Proxy(), Late("late"), list[Any]()

    def step(model: nn.Module, inp: dict[str, Any], given: Any = proxy) -> None:
        losses.append(late.names)
        model(inp["x"]).sum().backward()

    model = nn.Sequential(nn.Linear(4, 4))
    model.note = lambda: (proxy, model)  # type: ignore[assignment]
    cpu_trace(model, INP, step)
    assert losses == []
    assert vars(late)["names"] == ["names"]


def test_data_sets_are_not_looked_into() -> None:
    asked: list[str] = []

    class Samples(torch.utils.data.Dataset[int]):
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattribute__(name)

    samples = Samples()
    cpu_trace(nn.Linear(4, 4), INP, lambda m, i: (samples, m(i["x"]).sum().backward()))
    assert "__dict__" not in asked


def test_copies_of_tensors_that_a_step_makes_and_writes_to_go_with_them() -> None:
    def copies() -> int:
        return sum(len(each) == 4 * 4097 for each in gc.get_objects() if type(each) is torch.UntypedStorage)

    model = nn.Linear(4, 4)
    with user_objects_restored(model) as found:
        made = torch.zeros(4097)
        found.before_write(made, None)
        assert copies()
        del made
        assert not copies()


def test_tensors_are_copied_beforehand_where_no_operator_is_seen() -> None:
    model, kept = nn.Linear(2, 2), [torch.zeros(3)]

    def step() -> None:
        kept[0].add_(1)
        kept.append(torch.ones(1))

    with user_objects_restored(model, step, writes_unseen=True):
        step()
    assert [each.tolist() for each in kept] == [[0.0, 0.0, 0.0]]


def test_copies_of_what_a_step_writes_to_are_gone_without_the_garbage_collector() -> None:
    table = torch.zeros(4099)

    def step(model: nn.Module, inp: Any) -> None:
        table.add_(1)
        sum_step(model, inp)

    def copies() -> int:
        found = [each for each in gc.get_objects() if isinstance(each, torch.UntypedStorage)]
        return sum(len(each) == table.nbytes and each.data_ptr() != table.data_ptr() for each in found)

    gc.collect()
    gc.disable()
    try:
        before = copies()
        cpu_trace(nn.Linear(4, 4), INP, step)
        assert copies() == before
    finally:
        gc.enable()
    assert not table.any()
