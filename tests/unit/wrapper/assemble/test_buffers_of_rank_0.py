"""The messages with rank 0's buffers, and what becomes of them, with ranks that only answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

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
