"""Layers given to torch.compile run as units: bits, graphs and loads are those of plain compiled PyTorch and the plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.access.compiled_units import compile_module, compiled_units
from elixir.errors import InputError, InputTypeError
from elixir.models.layer_units import repeated_layers
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.run_options import Debug
from tests.common.parity import (
    COUNTED,
    MODES,
    Case,
    assert_as_planned,
    case,
    mixed,
)

LISTS = {
    "opt": "model.decoder.layers", "gpt2": "transformer.h", "llama": "model.layers", "bert": "bert.encoder.layer",
    "t5": "encoder.block", "vit": "vit.layers", "mixtral": "model.layers", "encoder": "layers",
}  # fmt: skip
"""Family -> the list of its layers (of two lists, the first)."""
CHECKPOINTS = ("none", "non-reentrant", "reentrant")
_EVERY = [
    (name, checkpoint, mode)
    for name in LISTS
    for checkpoint in (CHECKPOINTS if name not in ("encoder", "t5") else ("none",))
    for mode in MODES
]


def fresh() -> None:
    """Forgets compiled code and counts."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    fresh()
    yield
    fresh()


def compiled(model: nn.Module, backend: str = "aot_eager") -> nn.Module:
    for layer in repeated_layers(model):
        compile_module(layer, backend=backend)
    return model


def plan_of(it: Case, mode: str, **options: Any) -> Plan:
    """A plan of one rank for a model as it is, compiled or not."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    options = {"split_number": 8, "allocate_factor": 0.01, "hardware": "cpu"} | options
    where = "cuda" if mode == "resident" else "cpu"
    plan = simple_search(it.model, 1, inp=it.inp, step_fn=step, shard_device=where, **options).plan
    return mixed(plan) if mode == "mixed" else plan


def counted() -> tuple[int, int]:
    """Graphs compiled and breaks so far."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def train(it: Case, model: nn.Module, optimizer: Any, steps: int = 4) -> list[float]:
    """Losses of some steps, in plain PyTorch or under a plan."""
    losses = []
    for _ in range(steps):
        loss = it.loss(model, it.inp)
        optimizer.backward(loss) if isinstance(model, ElixirModule) else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(name: str, checkpoint: str, mode: str, backend: str = "aot_eager") -> None:
    """Trains plainly, then anew under a plan, with an empty cache of compiled code each time."""
    it = case(name, checkpoint)
    plain = compiled(copy.deepcopy(it.model), backend)
    compiled(it.model, backend)
    plan = plan_of(it, mode)
    assert plan.step.compiled == tuple(compiled_units(it.model).values())
    wanted = train(it, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    expected = counted()
    assert expected[0] > 0
    fresh()
    model = ElixirModule(it.model, plan, device="cpu", debug=Debug(poison=True))
    found = train(it, model, ElixirOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    assert found == wanted
    state, weights = model.state_dict(), plain.state_dict()
    assert [key for key, value in weights.items() if not torch.equal(state[key], value)] == []
    graphs, breaks = counted()
    assert graphs <= expected[0]
    assert breaks <= expected[1]
    # The other modes change homes, and what they predict is of the plan before.
    assert_as_planned(model, COUNTED if mode == "streamed" else ())
    model.close()


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "checkpoint", "mode"), _EVERY)
def test_same_bits_as_plain_compiled_pytorch(name: str, checkpoint: str, mode: str) -> None:
    check(name, checkpoint, mode)


class Sharing(nn.Module):
    """Layers with one weight in common."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(first, nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            input = layer(input)
        return input


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("name", ["opt", "gpt2", "llama"])
def test_same_bits_under_inductor(name: str, checkpoint: str, mode: str) -> None:
    check(name, checkpoint, mode, backend="inductor")


def test_the_whole_model_is_refused() -> None:
    it = case("llama")
    plan = plan_of(it, "streamed")
    it.model.compile(backend="aot_eager")
    with pytest.raises(InputError, match=r"the model was given to torch.compile.*compile its layers instead"):
        ElixirModule(it.model, plan, device="cpu")


@pytest.mark.parametrize(
    ("compile", "error", "says"),
    [
        ({"mode": "reduce-overhead"}, InputError, "model.layers.0 is compiled with CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, InputError, "model.layers.0 is compiled with CUDA graphs"),
        ("inductor", InputTypeError, "True, False or a dict"),
    ],
)
def test_what_compile_cannot_be(compile: Any, error: type[Exception], says: str) -> None:
    it = case("llama")
    with pytest.raises(error, match=says):
        elixir.wrap(it.model, torch.optim.AdamW(it.model.parameters()), inp=it.inp, compile=compile, placement="cpu")


def test_a_model_without_repeated_layers() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(InputError, match="Linear has none; call compile"):
        elixir.wrap(model, torch.optim.AdamW(model.parameters()), inp={"input": torch.randn(2, 4)}, compile=True)
