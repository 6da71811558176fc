"""A trace uses the user's own model, whose tensors are on meta meanwhile and the same as before afterwards."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from elixir.access.interception import Interception
from elixir.errors import InputError, TraceError
from elixir.tracer import meta
from elixir.tracer.meta import on_meta
from elixir.tracer.trace import trace_step
from tests.common.tracing import H200, Seen, cpu_trace, sum_step

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


def in_forward(model: Tail, wrap: Callable[[Any, Any], Any]) -> None:
    """Replaces the forward of the second layer by one around it."""
    layer, old = model.head, model.head.forward
    layer.forward = wrap(lambda layer, x: old(x), layer)  # type: ignore[method-assign]


def run_by(model: Tail, run: Any) -> None:
    model.run = run


def held_weakly(model: Tail) -> None:
    reference = weakref.ref(model)
    model.run = lambda x: reference().head(x)  # type: ignore[union-attr]


def held_as_weight(model: Tail) -> None:
    weight, bias = model.head.weight, model.head.bias
    model.run = lambda x: nn.functional.linear(x, weight, bias)


OUTSIDE: list[Any] = []
HOLDS: dict[str, Callable[[Tail], Any]] = {
    "closure": lambda model: run_by(model, lambda x: model.head(x)),
    "partial of a closure": lambda model: in_forward(model, functools.partial),
    "method of a closure": lambda model: in_forward(model, types.MethodType),
    "weak reference": held_weakly,
    "weight": held_as_weight,
    "global name": lambda model: (OUTSIDE.append(model), run_by(model, lambda x: OUTSIDE[-1].head(x))),
}


def memory(model: nn.Module) -> list[Any]:
    """Returns the tensors of a model, where they lie, and what they hold."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(each), each.data_ptr(), each.requires_grad, each.tolist()) for name, each in tensors]


@pytest.mark.parametrize("name", HOLDS)
def test_a_function_that_holds_the_model_is_traced_as_the_plain_one(name: str) -> None:
    plain, model = Tail(), Tail()
    HOLDS[name](model)
    before = memory(model)
    expected, found = (trace_step(each, INP, sum_step, hardware=H200) for each in (plain, model))
    assert [use.parameters for use in found.accesses] == [use.parameters for use in expected.accesses]
    assert found.backward_peak_bytes == expected.backward_peak_bytes
    assert memory(model) == before


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


def test_gradients_hooks_and_attributes_of_weights_stay_theirs() -> None:
    model, heard = Tail(), list[str]()
    weight = model.body.weight
    held = weight * 1.0  # a graph that is alive, with a node that accumulates gradients
    kept = weight.grad = torch.ones_like(weight)
    weight.note = "mine"  # type: ignore[attr-defined]
    weight.register_hook(lambda gradient: heard.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda each: heard.append("accumulated"))

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        assert weight.grad is None
        weight.note, weight.more = "its", 1  # type: ignore[attr-defined]
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda each: None)
        sum_step(model, inp)

    cpu_trace(model, INP, step)
    assert (heard, vars(weight)) == ([], {"note": "mine"})
    assert weight.grad is kept
    held.sum().backward()
    assert heard == ["gradient", "accumulated"]
    assert weight.grad.tolist() == [[2.0] * 8] * 8  # type: ignore[union-attr]


def test_optimizers_that_a_step_calls_leave_weights_and_gradients_alone() -> None:
    model = Tail()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    sum_step(model, INP)
    optimizer.step()
    optimizer.zero_grad()
    before, states = memory(model), repr(optimizer.state_dict())

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        sum_step(model, inp)
        optimizer.step()
        optimizer.zero_grad()

    found, expected = (cpu_trace(model, INP, each, optimizer="AdamW") for each in (step, sum_step))
    assert found.step_peak_bytes == expected.step_peak_bytes
    assert found.grad_bytes == expected.grad_bytes > 0
    assert (memory(model), repr(optimizer.state_dict())) == (before, states)


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


def test_tensors_in_the_memory_of_weights_are_there_afterwards() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].rows = model[0].weight.detach()[:2]
    model[1].weight = model[0].weight
    before = memory(model)
    cpu_trace(model, INP, sum_step)
    assert memory(model) == before
    assert model[0].rows.data_ptr() == model[0].weight.data_ptr() == model[1].weight.data_ptr()  # type: ignore[union-attr, operator]
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(InputError, match="two parameters in the same memory"):
        cpu_trace(model, INP, sum_step)


def test_a_model_on_meta_is_its_own_unless_it_has_gradients_to_keep() -> None:
    model, seen = nn.Linear(4, 4, device="meta"), Seen()
    inp = {"x": torch.ones(2, 4)}

    def step(model: nn.Module, inp: Any) -> None:
        seen.append(model.weight._cdata)  # type: ignore[union-attr]
        sum_step(model, inp)

    cpu_trace(model, inp, step)
    assert next(iter(seen)) == model.weight._cdata
    model.weight.grad = kept = torch.zeros_like(model.weight)
    cpu_trace(model, inp, step)
    assert next(iter(seen)) != model.weight._cdata
    assert model.weight.grad is kept


def test_a_second_model_that_needs_gradients_is_refused() -> None:
    class Trains:
        def __init__(self) -> None:
            self.other_model, self.ref_model = nn.Linear(8, 8), nn.Linear(8, 8)

        def step(self, model: nn.Module, inp: dict[str, Any]) -> None:
            with torch.no_grad():
                shift = self.ref_model(inp["x"])
            model(inp["x"] + shift).sum().backward()

    trainer, alone = Trains(), nn.Linear(8, 8)
    for step in (trainer.step, lambda model, inp: model(alone(inp["x"])).sum().backward()):
        with pytest.raises(TraceError, match=r"CPU tensor of shape \(8,.*requires_grad_\(False\)"):
            cpu_trace(Tail(), INP, step)
    trainer.ref_model.requires_grad_(False)
    cpu_trace(Tail(), INP, trainer.step)


def test_nothing_but_a_module_is_put_on_meta() -> None:
    with pytest.raises(TypeError, match="expected an nn.Module"), on_meta(3, None):  # type: ignore[arg-type]
        pass


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


def test_a_model_from_a_torchscript_file_is_trained(tmp_path: Path) -> None:
    """Its weights are no `nn.Parameter`s."""
    torch.jit.save(torch.jit.script(nn.Linear(8, 4)), str(tmp_path / "model.pt"))
    model = torch.jit.load(str(tmp_path / "model.pt"))
    found = cpu_trace(model, INP, lambda model, inp: model(inp["x"]).sum().backward())
    assert all(parameter.trainable for parameter in found.parameters)


@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward(loss)])
def test_a_default_device_of_the_user_stays_and_nothing_of_the_trace(backward: Callable[[torch.Tensor], None]) -> None:
    """`torch.device` as a context is a mode next to the trace's own."""
    with torch.device("cpu"):
        before = [type(mode) for mode in _get_current_function_mode_stack()]
        cpu_trace(Tail(), INP, lambda model, inp: backward(model(**inp).sum()))
        assert [type(mode) for mode in _get_current_function_mode_stack()] == before
