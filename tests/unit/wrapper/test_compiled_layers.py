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
    Pair,
    assert_as_planned,
    case,
    mixed,
    square_loss,
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


def test_layers_that_share_a_weight_fetch_their_other_weights() -> None:
    """Compiled code asks for no weight itself, and reads what is in memory, or none."""
    it = Case(Sharing(), {"input": torch.randn(4, 8)}, square_loss)
    plain = copy.deepcopy(it.model)
    compiled(it.model, "eager")
    with Pair(it, plan_of(it, "streamed"), plain=plain, device="cpu") as pair:
        pair.train(2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("name", ["opt", "gpt2", "llama"])
def test_same_bits_under_inductor(name: str, checkpoint: str, mode: str) -> None:
    check(name, checkpoint, mode, backend="inductor")


@pytest.mark.slow
def test_a_checkpoint_outside_of_the_graph_is_refused_or_has_the_same_bits() -> None:
    """Some compilers break the graph of T5's layers before their checkpoint, which then runs again as eager code. Others
    break it as well, and compile what the checkpoint runs."""
    it = case("t5", "non-reentrant")
    plain = compiled(copy.deepcopy(it.model))
    compiled(it.model)
    with Pair(it, plan_of(it, "streamed"), plain=plain, device="cpu") as pair:
        refused = ""
        try:
            pair.train(2)
        except InputError as error:
            refused = str(error)
        if refused:
            assert "checkpoints activations outside of its graph" in refused
        else:
            pair.assert_same_weights()


def test_layers_are_those_of_the_outermost_lists() -> None:
    for name, where in LISTS.items():
        model = case(name).model
        names = list(repeated_layers(model).values())
        layers = model.get_submodule(where)
        assert [f"{where}.{number}" for number in range(len(layers))] == [n for n in names if n.startswith(f"{where}.")]
        assert all("." not in n.removeprefix(f"{where}.") for n in names if n.startswith(f"{where}."))


def test_a_wrap_that_fails_compiles_nothing() -> None:
    it = case("llama")
    with pytest.raises(elixir.PlanError):
        elixir.wrap(
            it.model, torch.optim.AdamW(it.model.parameters()), inp=it.inp, compile={"backend": "aot_eager"},
            device_memory="8KiB", placement="cuda",
        )  # fmt: skip
    assert not compiled_units(it.model)
    assert all(layer._compiled_call_impl is None for layer in repeated_layers(it.model))


def test_a_layer_whose_code_breaks_and_raises_leaves_the_model_usable() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            if self.fails:
                raise ValueError("on purpose")
            return self.second(x).relu()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Model()
    it = Case(compiled(model), {"x": torch.randn(4, 8)}, lambda m, inp: m(**inp).square().mean())
    plain = compiled(copy.deepcopy(model))
    with Pair(it, plan_of(it, "streamed", split_number=4), plain=plain) as pair:
        pair.train(2)
        model.layers[1].fails = True
        with pytest.raises(ValueError, match="on purpose"):
            pair.module(**it.inp)
        assert all(isinstance(p, nn.Parameter) for p in pair.module.module.parameters())
        model.layers[1].fails = False
        pair.train(2)


def test_the_plan_must_have_been_made_for_the_same_compiled_layers() -> None:
    it = case("llama")
    plain_plan = plan_of(it, "streamed")
    compiled(it.model)
    with pytest.raises(InputError, match=r"model.layers.0 is given to torch.compile, and not when the plan was made"):
        ElixirModule(it.model, plain_plan, device="cpu")
    compiled_plan = plan_of(it, "streamed")
    for layer in it.model.model.layers:
        layer._compiled_call_impl = None
    with pytest.raises(InputError, match=r"model.layers.0 is not given to torch.compile, and was when"):
        ElixirModule(it.model, compiled_plan, device="cpu")


def test_the_whole_model_is_refused() -> None:
    it = case("llama")
    plan = plan_of(it, "streamed")
    it.model.compile(backend="aot_eager")
    with pytest.raises(InputError, match=r"the model was given to torch.compile.*compile its layers instead"):
        ElixirModule(it.model, plan, device="cpu")


def test_layers_compiled_with_cuda_graphs_before_are_refused() -> None:
    it = case("llama")
    for layer in it.model.model.layers:
        layer.compile(mode="reduce-overhead")
    with pytest.raises(InputError, match="model.layers.0 is compiled with CUDA graphs"):
        plan_of(it, "streamed")
    assert plan_of(it, "resident").step.units


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


class Adapted(nn.Module):
    """A linear layer to be quantised, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.own = nn.Linear(16, 16), nn.Linear(16, 16)
        self.base.requires_grad_(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.own(torch.tanh(self.base(input)))


@pytest.mark.parametrize(("mode", "backend"), [("streamed", "aot_eager"), ("resident", "eager")])
def test_quantised_weights_have_the_bits_of_plain_compiled_pytorch(mode: str, backend: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted())
    ao.quantize_(model, ao.Int8WeightOnlyConfig(), filter_fn=lambda layer, name: name.endswith("base"))
    it = Case(model, {"input": torch.randn(3, 16)}, square_loss)
    plain = compiled(copy.deepcopy(model), backend)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    wanted = train(it, plain, torch.optim.AdamW(trained, lr=1e-2), steps=3)
    expected = counted()
    fresh()
    compiled(model, backend)
    module = ElixirModule(model, plan_of(it, mode, split_number=2), device="cpu", debug=Debug(poison=True))
    mine = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = train(it, module, ElixirOptimizer(module, torch.optim.AdamW(mine, lr=1e-2)), steps=3)
    assert found == wanted
    assert counted() == expected
    assert_as_planned(module, ())
    module.close()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other)
