"""The messages with rank 0's buffers, and what becomes of them, with ranks that only answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.wrapper.assemble.origins import SharedBuffers


class Answers:
    """The group of a rank among two, which gets these answers by what is exchanged; in all else the other agrees."""

    def __init__(self, rank: int, answers: dict[str, Any] | None = None, *, size: int = 2) -> None:
        self.rank, self.size, self.answers = rank, size, answers or {}
        self.sent: list[torch.Tensor] = []

    def exchange(self, what: str, mine: Any) -> list[Any]:
        return [self.answers.get(what, mine), mine]

    def send_from_rank_0(self, message: torch.Tensor) -> None:
        self.sent.append(message.clone())
        if self.rank:
            message.add_(1)


class Network:
    """Does work at once."""

    def __init__(self) -> None:
        self.network = self
        self.waits = 0

    def ask(self, work: Callable[[], Any]) -> Any:
        return work()

    def submit(self, work: Callable[[], Any]) -> Any:
        work()
        return SimpleNamespace(wait=self.wait)

    def wait(self) -> None:
        self.waits += 1


def buffers_of(model: nn.Module, group: Any, lanes: Any) -> SharedBuffers:
    return SharedBuffers(model, group, lanes)


def model_of() -> nn.Module:
    """Buffers of two dtypes, one of which may not be written to outside of inference, and one that two names share."""
    model = nn.Module()
    model.register_buffer("codes", torch.zeros(5, dtype=torch.uint8))
    model.register_buffer("table", torch.zeros(2, 2), persistent=False)
    model.register_buffer("bits", torch.zeros(3, dtype=torch.uint8))
    model.register_buffer("again", model.table)
    with torch.inference_mode():
        model.register_buffer("made", torch.zeros(3, dtype=torch.uint8))
    return model


def test_one_rank_and_models_without_buffers_exchange_nothing() -> None:
    for model, size in ((model_of(), 1), (nn.Linear(2, 2), 2)):
        lanes: Any = SimpleNamespace(network=None)
        shared = buffers_of(model, Answers(0, size=size), lanes)
        shared.before_forward()
        assert shared.of_rank_0() == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_come_in_one_message_for_each_dtype_before_forwards_after_gradients(rank: int) -> None:
    model, group, lanes = model_of(), Answers(rank), Network()
    before = dict(model.named_buffers())
    versions = model.codes._version
    shared = buffers_of(model, group, lanes)
    shared.before_forward()
    assert [(message.dtype, message.numel()) for message in group.sent] == [(torch.float32, 4), (torch.uint8, 11)]
    assert lanes.waits == 1
    now = dict(model.named_buffers())
    assert all(bool((each == rank).all()) for each in now.values())
    assert [now[name] is before[name] for name in ("codes", "table", "bits", "made")] == [True, True, True, not rank]
    assert model.codes._version == versions, "a forward may already have saved it"
    with torch.no_grad():
        shared.after_forward()
    shared.before_forward()
    assert len(group.sent) == 2, "none are due after a forward without gradients"
    found = shared.of_rank_0()
    assert set(found) == (set(now.values()) if rank else set())
    assert all(bool((each == rank).all()) for each in now.values()), "they stay as they are"
    shared.after_forward()
    shared.before_forward()
    assert len(group.sent) == 6


def test_a_buffer_that_another_rank_lacks_is_named() -> None:
    answer = {"kinds of buffers": 0, "different buffers": {"codes": "buffer cpu torch.strided torch.uint8 uint8 [5]"}}
    shared = buffers_of(model_of(), Answers(1, answer), Network())
    with pytest.raises(InputError, match=r"^table, bits, made differ between ranks 0 and 1 \(missing and buffer cpu"):
        shared.before_forward()


def test_compute_has_read_what_came_on_another_stream_before_its_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    late = SimpleNamespace(is_cuda=True, device="cuda:0", record_stream=read.append)
    model = nn.Module()
    model.register_buffer("table", torch.eye(2).to_sparse())
    shared = buffers_of(model, Answers(0, {"sparse buffers": [late]}), Network())
    shared.before_forward()
    assert read == ["stream of cuda:0"]
