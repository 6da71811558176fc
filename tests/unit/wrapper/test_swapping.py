"""Units whose activations are on the host between forward and backward: bits, bytes, peaks, and what is refused."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from benchmark.observe import observe_step
from elixir.access import activations as swapping
from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.plan.plan import Plan
from elixir.search.planner import simple_plan
from elixir.search.request import SearchRequest
from elixir.step_trace import INPUT, SAVED, Result, StepShape, StepTrace, UnitActivations
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.parity import Case, case, mixed
from tests.common.tracing import cpu_trace
from tests.unit.wrapper.test_recomputation import PRODUCTS

SWAPPED = {
    "inputs": (UnitActivations("", (), (Result(INPUT, 0),)),) * 3,
    "inputs of some": (UnitActivations("", (), (Result(INPUT, 0),)), UnitActivations("", ())),
    "next to what is kept": (UnitActivations("", PRODUCTS, (Result(INPUT, 0),)),),
    "all that is saved": (UnitActivations("", None, (Result(SAVED, 0),)),),
    "by turns": (
        UnitActivations("", None, (Result(SAVED, 0),)),
        UnitActivations("", (), (Result(INPUT, 0),)),
        UnitActivations("", None),
    ),
}
_EVERY = [
    (name, own, swapped, mode)
    for name in ("llama", "opt", "gpt2", "vit", "stack")
    for own in ("none", "non-reentrant")
    for swapped in SWAPPED
    for mode in ("streamed", "mixed", "resident")
    if not (name in ("vit", "stack") and own != "none")
]
_FIRST = ("llama", "none", "by turns", "streamed")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "SMALLEST_BYTES", 16)


def step_of(it: Case) -> Any:
    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    return step


def traced(it: Case, swapped: str) -> StepTrace:
    """The step of a case, whose layers take turns."""
    units = cpu_trace(it.model, it.inp, step_of(it)).units
    turns = SWAPPED[swapped]
    own = tuple(
        UnitActivations(unit.name, each.keep, each.swap)
        for unit, each in zip(units, [turns[n % len(turns)] for n in range(len(units))], strict=True)
    )
    return cpu_trace(it.model, it.inp, step_of(it), shape=StepShape(activations=own))


def plan_of(trace: StepTrace, mode: str) -> Plan:
    request = SearchRequest(world_size=1, optimizer_type="AdamW")
    where = "cuda" if mode == "resident" else "cpu"
    plan = simple_plan(trace, preset("cpu"), request, split_number=12, allocate_factor=1.0, shard_device=where)
    assert Plan.from_json(plan.to_json()) == plan
    return mixed(plan) if mode == "mixed" else plan


@pytest.mark.sampled
@pytest.mark.parametrize("swapped", ["inputs", "all that is saved", "by turns"])
def test_the_peak_of_a_real_step(swapped: str) -> None:
    it = case("llama", hidden_size=128, intermediate_size=352, num_hidden_layers=5)
    trace = traced(it, swapped)
    assert trace.step.swap_bytes > 0
    model = ElixirModule(it.model, plan_of(trace, "resident"), device="cpu")
    optimizer = ElixirOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        optimizer.backward(it.loss(model, inp))

    step(model, it.inp)  # which makes the host's buffers
    optimizer.step()
    optimizer.zero_grad()
    real = observe_step(model, it.inp, step).peak_bytes
    model.close()
    predicted = trace.backward_peak_bytes - trace.param_bytes - trace.buffer_bytes
    assert predicted == pytest.approx(real, rel=0.002)


class Sending:
    """Takes note of what it is to move; nothing moves."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, tensor: torch.Tensor) -> Any:
        self.sent.append(tensor.data_ptr())


def moving(mover: Sending, *swap: Result) -> Any:
    """A context that moves these results of the first of two units."""
    units = [SimpleNamespace(name=name) for name in "01"]
    activations = [SimpleNamespace(unit="0", keep=None, swap=swap)]
    step: Any = SimpleNamespace(units=units, activations=activations)
    return swapping.Swapping(nn.Sequential(nn.Identity(), nn.Identity()), step, mover).moving("0")


def test_a_result_that_was_written_to_while_it_moved_is_refused() -> None:
    mover, x = Sending(), torch.ones(1024, requires_grad=True)
    with moving(mover, Result(SAVED, 0)):
        result = x.exp()
    assert mover.sent == [result.data_ptr()]
    with torch.no_grad():
        result.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation while it moved to the host; plan without"):
        result.sum().backward()


class Copies:
    """Copies at once, and takes note of what happens to each copy."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def send(self, tensor: torch.Tensor) -> Any:
        number, copy = sum(event.startswith("send") for event in self.events), tensor.clone()
        self.events.append(f"send {number}")
        noted = {name: partial(self.events.append, f"{name} {number}") for name in ("arrived", "fetch", "forget")}
        return SimpleNamespace(tensor=lambda: copy, **noted)


class Exponential(nn.Linear):
    """Saves its input, its weight and its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).exp()


def test_each_storage_moves_once_after_its_unit_and_back_before_its_backward() -> None:
    model, mover, x = nn.Sequential(*(Exponential(8, 8) for _ in range(3))), Copies(), torch.randn(4, 8)
    units, everything = [SimpleNamespace(name=name) for name in "012"], (Result(SAVED, 0),)
    activations: Any = [UnitActivations(name, None, everything) for name in "012"]
    swapper = swapping.Swapping(model, SimpleNamespace(units=units, activations=activations), mover)  # type: ignore[arg-type]
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with swapping.recomputing(model, activations, swapper):
        loss = model(x).sum()
        # The input of the second unit is the result of the first, which has moved it.
        forward = ["send 0", "send 1", "send 2", "arrived 0", "arrived 1", "send 3", "arrived 3", "arrived 2"]
        assert mover.events == forward
        assert swapper.moved_bytes == {"0": 2 * x.nbytes, "1": x.nbytes, "2": x.nbytes}
        loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, found, expected))
    assert mover.events == [*forward, "fetch 2", "forget 3", "fetch 1", "fetch 0", "forget 2", "forget 1", "forget 0"]
    model(x)
    assert len(mover.events) == 15  # an ordinary model again


def test_inputs_that_are_named_move_unless_they_are_parameters_small_or_a_part() -> None:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[1].clone()

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, requires_grad=True)

    # Checkpoints of torch 2.11 save an empty tensor before a unit's inputs; a weight has no number either.
    whole = ones(64)
    given = (torch.empty(0), ones(1024), nn.Parameter(ones(64)), whole, ones(3), ones(64)[:15], ones(4))
    for numbers, moved in (((1,), [whole]), ((0, 2, 3), [given[1]]), ((4,), [given[6]])):
        mover = Sending()
        with moving(mover, *(Result(INPUT, number) for number in numbers)):
            Saves.apply(*given)
        assert mover.sent == [each.data_ptr() for each in moved]


@pytest.mark.parametrize("place", ["itself", "inside", "around"])
def test_a_layer_whose_results_move_is_not_compiled_late(place: str) -> None:
    it = case("llama")
    plan = plan_of(traced(it, "inputs"), "streamed")
    moved = next(each.unit for each in plan.activations if each.swap)
    name = {"itself": moved, "inside": f"{moved}.mlp", "around": moved.partition(".")[0]}[place]
    module = ElixirModule(it.model, plan, device="cpu")
    it.loss(module, it.inp)
    it.model.get_submodule(name).compile(backend="eager")
    with pytest.raises(InputError, match=rf"{name} was compiled after the plan was made, which keeps or moves"):
        it.loss(module, it.inp)


# --- steps that move activations themselves -------------------------------------------------------------------------


@pytest.fixture
def moved_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    original = saved_tensors_hooks.__init__

    def init(self: Any, pack: Any, unpack: Any) -> None:
        def counted(tensor: torch.Tensor) -> Any:
            sizes.append(tensor.numel() * tensor.itemsize)
            return pack(tensor)

        original(self, counted if isinstance(self, save_on_cpu) else pack, unpack)

    monkeypatch.setattr(saved_tensors_hooks, "__init__", init)
    return sizes
