"""Functions that hold the model run its copy in a trace, and the model itself afterwards."""

from __future__ import annotations

import collections
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from elixir.errors import TraceError
from elixir.tracer import copied_functions
from elixir.tracer.meta_copy import meta_copy
from elixir.tracer.trace import trace_step
from tests.common.tracing import H200, cpu_trace, sum_step

INP = {"x": torch.ones(2, 8)}


class Tail(nn.Module):
    """Two layers, of which the second is run by whatever `run` is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.run: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.head(x) if self.run is None else self.run(x)


class Helper:
    """Holds a layer without being one."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


def calls_itself(layer: nn.Module) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, again: bool = True) -> torch.Tensor:
        return run(x, False) if again else layer(x)

    return run


def in_forward(model: Tail, wrap: Callable[[Any, Any], Any]) -> None:
    """Replaces the forward of the second layer by one around it."""
    layer, old = model.head, model.head.forward

    def new(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return old(x)

    layer.forward = wrap(new, layer)  # type: ignore[method-assign]


def through(model: Tail, run: Any) -> None:
    model.run = run


def held_by_helper(model: Tail) -> None:
    helper = Helper(model.head)
    through(model, lambda x: helper.layer(x))


def held_weakly(model: Tail) -> None:
    reference = weakref.ref(model)
    through(model, lambda x: reference().head(x))  # type: ignore[union-attr]


def held_as_weight(model: Tail) -> None:
    weight, bias = model.head.weight, model.head.bias
    through(model, lambda x: nn.functional.linear(x, weight, bias))


class Pair(NamedTuple):
    """Two layers."""

    first: Any
    second: Any


def held_in(model: Tail, held: Any, take: Callable[[Any], Any]) -> None:
    """Has a closure hold something in which there is the second layer."""
    through(model, lambda x: take(held)(x))


HOLDS: dict[str, Callable[[Tail], Any]] = {
    "dict in a closure": lambda model: held_in(model, {1: model.head}, lambda held: held[1]),
    "list in a closure": lambda model: held_in(model, [[0, model.head]], lambda held: held[0][1]),
    "deque in a closure": lambda model: held_in(model, collections.deque([model.head]), lambda held: held[0]),
    "pair in a closure": lambda model: held_in(model, Pair(1, model.head), lambda held: held.second),
    "partial in a closure": lambda model: held_in(
        model, functools.partial(lambda layer, x: layer(x), layer=model.head), lambda held: lambda x: held(x=x)),
    "built-in in a closure": lambda model: held_in(model, {1: model.head}.get, lambda held: held(1)),
    "lambda": lambda model: through(model, lambda x: model.head(x)),
    "default": lambda model: through(model, lambda x, layer=model.head: layer(x)),
    "default of a keyword": lambda model: through(model, lambda x, *, layer=model.head: layer(x)),
    "itself": lambda model: through(model, calls_itself(model.head)),
    "partial": lambda model: through(model, functools.partial(lambda layer, x: layer(x), model.head)),
    "partial of a closure": lambda model: in_forward(model, functools.partial),
    "method of a closure": lambda model: in_forward(model, types.MethodType),
    "helper": held_by_helper,
    "weak reference": held_weakly,
    "weight": held_as_weight,
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDS)
def test_a_function_that_holds_the_model_is_traced_as_the_plain_one(name: str) -> None:
    plain, model = Tail(), Tail()
    HOLDS[name](model)
    expected, found = (trace_step(each, INP, sum_step, hardware=H200) for each in (plain, model))
    assert [use.parameters for use in found.accesses] == [use.parameters for use in expected.accesses]
    assert found.backward_peak_bytes == expected.backward_peak_bytes
    model(INP["x"]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_functions_in_containers_and_hooks_run_the_copy() -> None:
    model = Tail()
    seen: list[Any] = []
    model.steps = [lambda x: model.head(x)]  # type: ignore[assignment]
    model.named = {"tail": (lambda x: model.steps[0](x),)}  # type: ignore[assignment, operator]
    through(model, lambda x: model.named["tail"][0](x))
    model.kept = None  # type: ignore[assignment]
    model.head.register_forward_hook(lambda layer, args, output: seen.append(setattr(model, "kept", output)))
    cpu_trace(model, INP, sum_step)
    assert (model.kept, seen) == (None, [])


def test_functions_that_hold_nothing_of_the_model_stay_what_they_are() -> None:
    other = nn.Linear(8, 8)
    run = lambda x: other(x)  # noqa: E731
    model = Tail()
    model.run, model.act = run, nn.functional.relu
    given, values = [1], torch.ones(2)
    model.held = lambda given=given, values=values: (model, given, values)  # type: ignore[assignment]
    twin = meta_copy(model, None).model
    assert (twin.run, twin.act) == (run, nn.functional.relu)
    assert [id(each) for each in twin.held()] == [id(twin), id(given), id(values)]


OUTSIDE = Tail()


def test_the_copy_of_a_function_has_its_signature_and_its_attributes() -> None:
    model = Tail()

    def run(x: torch.Tensor) -> torch.Tensor:
        return model.head(x)  # type: ignore[no-any-return]

    vars(run).update(layer=model.head, number=3)
    model.run = run
    twin = meta_copy(model, None).model
    assert twin.run is not run
    assert inspect.signature(twin.run) == inspect.signature(run)
    assert vars(twin.run) == {"layer": twin.head, "number": 3}


class Alone:
    """Is what it is in every copy."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self


def test_what_does_not_want_to_be_copied_is_not() -> None:
    model = Tail()
    model.run = Alone(model.head)
    assert meta_copy(model, None).model.run is model.run


def test_a_function_that_holds_too_much_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tail()
    held = [model.head]
    through(model, lambda x: held[0](x))
    for most, stays in ((5, True), (6, False)):  # the function, its list and the layer, its defaults of both kinds
        monkeypatch.setattr(copied_functions, "MOST_OBJECTS", most)
        assert (meta_copy(model, None).model.run is model.run) == stays


def test_a_global_name_for_the_model_is_refused_by_the_weight() -> None:
    through(OUTSIDE, lambda x: OUTSIDE.head(x))
    with pytest.raises(TraceError, match=r"weight 'head\.(weight|bias)' of the model itself.*not by a global name"):
        cpu_trace(OUTSIDE, INP, sum_step)


def test_a_second_model_is_refused_by_its_name() -> None:
    class Trains:
        def __init__(self) -> None:
            self.other_model, self.ref_model = nn.Linear(8, 8), nn.Linear(8, 8)

        def step(self, model: nn.Module, inp: dict[str, Any]) -> None:
            with torch.no_grad():
                shift = self.ref_model(inp["x"])
            model(inp["x"] + shift).sum().backward()

    trainer = Trains()
    with pytest.raises(TraceError, match=r"'ref_model' of the Trains, a second model.*requires_grad_\(False\)"):
        cpu_trace(Tail(), INP, trainer.step)
    trainer.ref_model.requires_grad_(False)
    cpu_trace(Tail(), INP, trainer.step)


def test_a_second_model_of_a_class_and_one_of_nobody_have_names_too() -> None:
    class Holds:
        other = nn.Linear(8, 8)

    alone = nn.Linear(8, 8)
    for run, name in ((lambda x: Holds.other(x), "'other' of the Holds"), (lambda x: alone(x), "a Linear")):

        def step(model: nn.Module, inp: dict[str, Any], run: Any = run) -> None:
            model(run(inp["x"])).sum().backward()

        with pytest.raises(TraceError, match=f"step_fn runs {name}, a second model"):
            cpu_trace(Tail(), INP, step)
