"""A step function gets the batch as the user has it: the same trace whatever holds its tensors."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from elixir.hardware.profile import preset
from elixir.tracer.trace import trace_step

X, Y = torch.ones(6, 8), torch.zeros(6, 4)


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    y: Any
    name: str = "first"


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Tokens(UserDict[str, Any]):
    """A mapping that is no dict, such as a tokenizer returns."""

    kept = "as it is"

    @property
    def x(self) -> Any:
        return self["x"]


class Named(dict[str, Any]):
    """A dict that knows more."""


def by_name(batch: Any) -> tuple[Any, Any]:
    return batch["x"], batch["y"]


def by_attribute(batch: Any) -> tuple[Any, Any]:
    y = batch.y
    return batch.x, y["y"] if isinstance(y, Mapping) else y


BATCHES: dict[str, tuple[Any, Callable[[Any], tuple[Any, Any]]]] = {
    "dict": ({"x": X, "y": Y}, by_name),
    "tuple": ((X, Y), tuple),
    "list": ([X, Y], tuple),
    "named tuple": (Pair(X, Y), by_attribute),
    "dataclass": (Batch(X, Y), by_attribute),
    "nested": (Batch(X, Tokens(y=Y)), by_attribute),
    "mapping": (Tokens(x=X, y=Y), by_name),
    "dict of another class": (Named(x=X, y=Y), by_name),
    "proxy": (MappingProxyType({"x": X, "y": Y}), by_name),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_the_trace_is_the_same_whatever_holds_the_tensors(kind: str) -> None:
    batch, read = BATCHES[kind]

    def step(model: nn.Module, got: Any) -> None:
        assert kind == "proxy" or type(got) is type(batch)
        x, y = read(got)
        assert x.is_meta
        (model(x) - y).square().mean().backward()

    def traced(inp: Any, step_fn: Any) -> Any:
        trace = trace_step(nn.Linear(8, 4), inp, step_fn, hardware=preset("cpu"), optimizer=None)
        return replace(trace, trace_s=0.0)

    def plainly(model: nn.Module, got: Any) -> None:
        (model(got["x"]) - got["y"]).square().mean().backward()

    found = traced(batch, step)
    assert found == traced({"x": X, "y": Y}, plainly)
    assert (found.step.samples, found.input_bytes > 0) == (6, True)
