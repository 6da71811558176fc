"""Whatever a trace runs leaves the user's objects as they were."""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elixir.errors import TraceError
from elixir.tracer import user_objects
from tests.common.tracing import CPU, H200, cpu_trace

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
