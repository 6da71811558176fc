"""Units whose activations are on the host between forward and backward: bits, bytes, peaks, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from benchmark.observe import observe_step
from elixir.access import activations as swapping
from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.plan.plan import Plan
from elixir.search import optimal_search
from elixir.search.planner import simple_plan
from elixir.search.request import SearchRequest
from elixir.step_trace import INPUT, SAVED, Result, StepShape, StepTrace, UnitActivations
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.parity import COUNTED, Case, Pair, assert_as_planned, case, hf_loss, mixed, take_step
from tests.common.tiny_models import tiny
from tests.common.tracing import H200, cpu_trace
from tests.common.twins import step_alike
from tests.unit.wrapper.test_compiled_layers import train
from tests.unit.wrapper.test_recomputation import PRODUCTS, made

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
@pytest.mark.parametrize(("name", "own", "swapped", "mode"), sorted(_EVERY, key=_FIRST.__ne__))
def test_same_bits_and_bytes_as_planned(name: str, own: str, swapped: str, mode: str) -> None:
    it = made(name, own)
    trace = traced(it, swapped)
    plan = plan_of(trace, mode)
    moved = plan.step.swap_bytes
    assert moved > 0
    assert plan.predicted.host_parts["swapped_activations"] == moved
    assert sum(each.nbytes for each in trace.transfers if each.direction == "device_to_host") == moved
    assert sum(each.nbytes for each in trace.transfers if each.direction == "host_to_device") == moved
    with Pair(it, plan, device="cpu", emulation=Emulation(bytes_per_s=1e9, delay_s=0.002)) as pair:
        pair.train(4)
        pair.assert_same_weights()
        assert_as_planned(pair.module, () if mode == "mixed" else COUNTED)
        assert inside.bytes_by_kind(pair.module, "host")["swapped_activations"] == moved
    assert train(it, it.model, torch.optim.SGD(it.model.parameters(), lr=0.0), steps=1)  # an ordinary model again


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


def test_batches_of_other_lengths_take_the_planned_host_memory_or_say_so(caplog: pytest.LogCaptureFixture) -> None:
    it = case("llama")
    trace = traced(it, "by turns")
    plan = plan_of(trace, "resident")
    model = ElixirModule(it.model, plan, device="cpu")
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    planned, taken = trace.step.swap_bytes, {}
    longer = {name: torch.cat((value, value), 1) for name, value in it.inp.items()}
    for length in (5, 13, 9, 24, 16, 24, 36, 48):
        take_step(optimizer, it.loss(model, {name: value[:, :length] for name, value in longer.items()}))
        taken[length] = inside.bytes_by_kind(model, "host")["swapped_activations"]
    assert all(nbytes == planned for length, nbytes in taken.items() if length <= 24)
    assert 1.5 * planned <= taken[36] < 2 * planned
    assert [
        record.message for record in caplog.records if "larger than the one that was traced" in record.message
    ] != []


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


def test_empty_tensors_are_no_inputs() -> None:
    """Checkpoints of torch 2.11 save an empty tensor before a unit's inputs."""

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[1].clone()

    mover, empty, (given, other) = Sending(), torch.empty(0), (torch.ones(1024, requires_grad=True) for _ in range(2))
    with moving(mover, Result(INPUT, 0)):
        Saves.apply(empty, given, other)
    assert mover.sent == [given.data_ptr()]


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


def _step(model: Any, batch: dict[str, Any], backward: Any = None) -> torch.Tensor:
    with save_on_cpu(pin_memory=True):
        loss = hf_loss(model, batch)
    (backward or torch.Tensor.backward)(loss)
    return loss.detach()


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


@pytest.mark.parametrize("placement", ["cuda", "cpu"])
def test_weights_stay_and_the_rest_is_as_traced(placement: Any, moved_bytes: list[int]) -> None:
    plain, planned = (tiny("gpt2", attn_implementation="eager", use_cache=False, layers=4) for _ in range(2))
    plain = gpu.there(plain)
    batch: dict[str, Any] = {"input_ids": torch.arange(32).reshape(2, 16), "labels": torch.arange(32).reshape(2, 16)}
    trace: StepTrace = trace_step(planned, batch, _step, hardware=H200)
    moved_bytes.clear()
    asked = {"hardware": H200, "device_memory": "1GiB", "host_budget": "1GiB", "assume": "nominal"}
    search = optimal_search(trace, 1, placement=placement, **asked)
    model = ElixirModule(planned, search)
    optimizer = ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    step_alike(reference, model, dict(plain.named_parameters()))
    assert {chunk.resident for chunk in search.plan.chunks} == {placement == "cuda"}
    for _ in range(3):
        moved_bytes.clear()
        loss = _step(model, batch, optimizer.backward)
        assert sum(moved_bytes) == trace.transferred_bytes("device_to_host") > 0
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, _step(plain, gpu.there(batch)))
        reference.step()
        reference.zero_grad()
    weights = model.state_dict()
    assert all(torch.equal(weights[name].cpu(), value.cpu()) for name, value in plain.state_dict().items())
