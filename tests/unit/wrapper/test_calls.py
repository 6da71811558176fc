"""The context around a call ends with the error of the call, and otherwise with its output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elixir.wrapper.calls import Arguments, Calls


class Halving(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.sum():
            raise ValueError("nothing to halve")
        return x / 2


def refuse_negative(model: nn.Module, args: Any, output: torch.Tensor) -> None:
    if output.sum() < 0:
        raise ValueError("negative")


def test_the_context_ends_with_the_error_of_its_call_or_with_its_output() -> None:
    model, ended = Halving(), list[Any]()
    model.register_forward_hook(refuse_negative)

    @contextlib.contextmanager
    def begin(model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Arguments, Callable[[Any], Any]]]:
        try:
            yield (args, kwargs), lambda output: output + 1
        except ValueError as error:
            ended.append(error)
            raise
        ended.append("well")

    calls = Calls([model], begin)
    calls.attach()
    with pytest.raises(ValueError, match="nothing to halve") as raised:
        model(torch.zeros(2))
    try:
        raise KeyError
    except KeyError:  # an error that the caller handles is none of the call's
        assert model(torch.full((2,), 4.0)).tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="negative") as refused:
        model(-torch.ones(2))
    calls.remove()
    assert model(torch.full((2,), 4.0)).tolist() == [2.0, 2.0]
    assert ended == [raised.value, "well", refused.value]
