"""The message with rank 0's buffers, and what becomes of it, with ranks that only answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.wrapper.assemble.shared_buffers import SharedBuffers


class Answers:
    """The group of a rank among two, which gets these answers and messages; without numbers, all agree."""

    def __init__(self, rank: int, *answers: Any, size: int = 2) -> None:
        self.rank, self.size, self.answers = rank, size, list(answers)
        self.sent: list[torch.Tensor] = []
        self.asked: list[str] = []

    def exchange(self, what: str, mine: Any) -> list[Any]:
        self.asked.append(what)
        return [self.answers.pop(0) if self.answers else mine, mine]

    def send_from_rank_0(self, message: torch.Tensor) -> None:
        self.sent.append(message.clone())
        if self.rank:
            message.add_(1)


class Network:
    """Does work at once."""

    def __init__(self) -> None:
        self.network = self
        self.calls: list[str] = []

    def submit(self, work: Callable[[], Any]) -> Any:
        work()
        return SimpleNamespace(
            wait=lambda: self.calls.append("wait"), synchronize=lambda: self.calls.append("synchronize")
        )


def buffers_of(model: nn.Module, group: Any, lanes: Any) -> SharedBuffers:
    return SharedBuffers(model, group, lanes)


def model_of() -> nn.Module:
    """Buffers of 5 bytes, of 16, and of 24, which one may not write to outside of inference."""
    model = nn.Module()
    model.register_buffer("codes", torch.zeros(5, dtype=torch.uint8))
    model.register_buffer("table", torch.zeros(4, dtype=torch.int32), persistent=False)
    with torch.inference_mode():
        model.register_buffer("made", torch.zeros(3, dtype=torch.int64))
    return model


def test_one_rank_and_models_without_buffers_exchange_nothing() -> None:
    for model, size in ((model_of(), 1), (nn.Linear(2, 2), 2)):
        lanes: Any = None
        shared = buffers_of(model, Answers(0, size=size), lanes)
        shared.before_forward()
        assert shared.of_rank_0() == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_come_in_one_message_at_multiples_of_16_bytes(rank: int) -> None:
    model, group, lanes = model_of(), Answers(rank), Network()
    before = dict(model.named_buffers())
    shared = buffers_of(model, group, lanes)
    shared.before_forward()
    (message,) = group.sent
    assert (message.dtype, message.numel()) == (torch.uint8, 16 + 16 + 32)
    assert lanes.calls == ["wait"]
    now = dict(model.named_buffers())
    ones = int.from_bytes(b"\1" * 8, "little")
    values = {"codes": [1] * 5, "table": [ones % 2**32] * 4, "made": [ones] * 3}
    assert {name: each.tolist() for name, each in now.items()} == {
        name: value if rank else [0] * len(value) for name, value in values.items()
    }
    assert [now[name] is before[name] for name in values] == [True, True, not rank]
    with torch.no_grad():
        shared.after_forward()
    shared.before_forward()
    assert len(group.sent) == 1, "none are due after a forward without gradients"
    found = shared.of_rank_0()
    assert lanes.calls == ["wait", "synchronize"]
    assert [each is now[name] for name, each in zip(values, found, strict=False)] == [True] * (3 * rank)
    assert len(group.sent) == 2
    shared.after_forward()
    shared.before_forward()
    assert len(group.sent) == 3


def test_compute_has_read_what_came_on_another_stream_before_its_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    late = SimpleNamespace(is_cuda=True, device="cuda:0", record_stream=read.append)
    here = SimpleNamespace(is_cuda=False)
    model = model_of()
    shared = buffers_of(model, Answers(1, 1, {"late": late, "here": here}, 1, {"late": late}), Network())
    shared.before_forward()
    assert read == ["stream of cuda:0"]
    assert model._buffers["late"] is late
    del model._buffers["late"], model._buffers["here"]
    assert shared.of_rank_0() == {}
    assert read == ["stream of cuda:0"] * 2
