"""A trace uses the user's own model, whose tensors are on meta meanwhile and the same as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elixir.access.interception import Interception
from elixir.errors import TraceError
from elixir.tracer import meta
from elixir.tracer.trace import trace_step
from tests.common.tracing import H200, cpu_trace, sum_step

INP = {"x": torch.ones(2, 8)}


class Tail(nn.Module):
    """Two layers, of which the second is run by whatever `run` is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.run: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)  # type: ignore[operator]
        x = self.body(x)
        return self.head(x) if self.run is None else self.run(x)


def memory(model: nn.Module) -> list[Any]:
    """Returns the tensors of a model, where they lie, and what they hold."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(each), each.data_ptr(), each.requires_grad, each.tolist()) for name, each in tensors]


def raises(error: BaseException) -> Callable[..., None]:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        model.body.weight.data = torch.zeros(3, device="meta")  # type: ignore[union-attr]
        model.head.requires_grad_(False)  # type: ignore[union-attr]
        model(inp["x"])
        raise error

    return step


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_step_that_raises_leaves_the_weights_where_they_are(error: BaseException, dtype: torch.dtype | None) -> None:
    model = Tail()
    before = memory(model)
    with pytest.raises((TraceError, KeyboardInterrupt)):
        cpu_trace(model, INP, raises(error), dtype=dtype)
    assert memory(model) == before


def test_interrupts_while_weights_are_exchanged_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:

    model, swap = Tail(), meta.swap_tensors
    before, ahead = memory(model), list[str]()

    def swaps(one: torch.Tensor, other: torch.Tensor) -> None:
        now = ahead.pop(0) if ahead else ""
        if now == "before":
            raise KeyboardInterrupt
        swap(one, other)
        if now == "after":
            raise KeyboardInterrupt

    monkeypatch.setattr(meta, "swap_tensors", swaps)
    for others in range(10):
        ahead += [""] * others + ["before", "before", "after"]
        with pytest.raises(KeyboardInterrupt):
            cpu_trace(model, INP, sum_step)
        assert memory(model) == before


def test_weights_that_a_cache_refers_to_are_refused_in_a_sentence() -> None:
    model = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(INP["x"])
        with pytest.raises(TraceError, match=r"shape \(8, 8\) cannot be put on meta.*outside of torch.autocast"):
            cpu_trace(model, INP, sum_step)
    assert memory(model)[0][2]


def test_scripted_layers_and_old_weight_norm_are_traced_and_run_afterwards() -> None:
    inner = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), inner, nn.BatchNorm1d(8))
    before, expected = memory(model), model(INP["x"]).tolist()
    model[2].reset_running_stats()  # type: ignore[operator]
    plain = nn.Sequential(nn.Linear(8, 8), torch.nn.utils.weight_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8))
    found, same = (trace_step(each, INP, sum_step, hardware=H200, dtype=torch.bfloat16) for each in (model, plain))
    assert found.param_bytes == same.param_bytes
    assert memory(model) == before
    assert model(INP["x"]).tolist() == expected


# What others do meanwhile ----------------------------------------------------------------------------------------------


def assert_back(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    assert all(type(each) is nn.Parameter and each.device.type == "cpu" for each in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def kept(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_profiler_that_records_shapes_is_refused() -> None:
    """It refers to memory of tensors that it has seen, and such memory cannot be exchanged."""
    model = Tail()
    before = kept(model)
    with torch.profiler.profile(record_shapes=True), pytest.raises(TraceError, match="outside of torch.profiler"):
        cpu_trace(model, INP, sum_step)
    assert_back(model, before)
    with torch.profiler.profile():
        found = cpu_trace(model, INP, sum_step)
    assert found.accesses == cpu_trace(model, INP, sum_step).accesses


def test_no_weight_is_lost_to_a_profiler_in_the_step() -> None:
    model = Tail()
    before = kept(model)

    def step(model: Any, inp: Any) -> None:
        with torch.profiler.profile(record_shapes=True):
            sum_step(model, inp)

    cpu_trace(model, INP, step)
    assert_back(model, before)


def test_an_interrupt_leaves_no_class_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tail()
    before = kept(model)

    def interrupted(self: Interception) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Interception, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cpu_trace(model, INP, sum_step)
    assert_back(model, before)
