"""Traps for micro-batches that pass a layer together: each case is right to the bit, or refused with a reason."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.errors import InputError
from elixir.models.model_tensors import fingerprint
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.one_pass import (
    Layer,
    Stack,
    batches,
    family,
    hf_loss,
    in_passes,
    plainly,
    plan_for,
    seeded,
    square_loss,
    three,
    vectors,
)


def check(
    make: Callable[[], nn.Module], loss: Any = square_loss, count: int = 3, steps: Any = None, **options: Any
) -> None:
    """Holds a model in passes against a loop."""
    steps = steps or vectors(count)
    plan = plan_for(make(), steps[0][0], loss, accumulation=count, **options)
    assert in_passes(make, steps, plan, loss).same_as(plainly(make, steps, loss))


def test_1_layers_run_with_gradients_on_so_that_the_same_kernels_are_chosen() -> None:
    seen = set()

    class Watching(Layer):
        def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            seen.add((torch.is_grad_enabled(), x.requires_grad))
            return super().forward(x, *more)

    check(seeded(lambda: Stack([Watching() for _ in range(2)])))
    assert seen == {(True, True)}


class Turned(Stack):
    """Gives layers, and what comes before them, gradients whose strides are not those of the tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        left = []
        for layer in self.layers:
            left.append(self.run(layer, x))
            x = _turned(left[-1])
        out: torch.Tensor = self.last(x + _turned(left[0]))
        return out


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().view(-1).mul(1.5).view(8, 4).t()


def test_1_gradients_keep_their_strides_so_that_the_same_kernels_are_chosen() -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(Layer):
        def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            out = super().forward(x, *more)
            out.register_hook(lambda gradient: seen.append(gradient.stride()))
            return out

    make, steps = seeded(lambda: Turned([Watching() for _ in range(2)])), vectors(2)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2)
    seen.clear()
    plainly(make, steps, square_loss)
    expected = sorted(seen)
    seen.clear()
    in_passes(make, steps, plan, square_loss)
    assert sorted(seen) == expected
    assert (1, 4) in seen


class Shared(Stack):
    """Every layer reads one tensor that operators before the layers have made, and the loss all outputs of layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.first(x * 2)
        view = bias.flip(0).unbind(0)[0]
        x = self.first(x)
        left = []
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, bias, view, bias, use_reentrant=False)
            left.append(x)
            x = (x.sin() + x.cos() + x.tanh()) / 3
        out: torch.Tensor = self.last(x) + sum(each.square().mean() for each in left)
        return out


def test_2_a_tensor_that_several_stages_read_gets_its_parts_one_by_one() -> None:
    check(seeded(lambda: Shared(three())), count=4)


class Tied(Stack):
    """The input layer's weight is the output layer's, and one layer is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x).expand(-1, 8)
        out: torch.Tensor = self.first(self.run(self.layers[0], x))
        return out


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_3_weights_of_several_stages_are_summed_as_in_a_loop(home: str) -> None:
    check(seeded(lambda: Tied(three())), count=4, steps=vectors(4, steps=3), home=home)


class Penalised(Stack):
    """Adds a penalty on weights of its layers to what they return."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(layer.linear.weight.square().mean() for layer in self.layers)


class Scaled(Stack):
    """Reads a weight of a layer before the layers run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.layers[1].linear.weight.abs().mean())


@pytest.mark.parametrize(("kind", "home"), [(Penalised, "cpu"), (Penalised, "cuda"), (Scaled, "cpu")])
def test_3_so_are_weights_that_are_read_without_a_call_of_their_module(kind: Any, home: str) -> None:
    check(seeded(lambda: kind(three())), count=4, home=home)


def test_3_but_not_before_their_module_where_nothing_watches_them() -> None:
    make, steps = seeded(lambda: Scaled(three())), vectors(4)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=4, home="cuda")
    with pytest.raises(InputError, match=r"before a layer read layers\.1\.linear\.weight, .* call the module"):
        in_passes(make, steps, plan, square_loss)


@pytest.mark.parametrize(("name", "output"), [("mixtral", "router_logits"), ("llama", "hidden_states")])
def test_4_what_hooks_catch_inside_of_layers_is_refused(name: str, output: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        made = model(**batch, **{f"output_{output}": True})
        found: torch.Tensor = made.loss + made[output][1].square().mean()
        return found

    make, steps = family(name), batches(name, 2, steps=1)
    plan = plan_for(make(), steps[0][0], accumulation=2)
    with pytest.raises(InputError, match="not among its outputs|being among its outputs"):
        in_passes(make, steps, plan, loss)


class Mixing(Stack):
    """Computes with tensors from before all layers, which enter these or not, between two of them or after them."""

    def __init__(self, where: str) -> None:
        super().__init__(three())
        self._where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart, x = self.first(x).sin(), self.first(x)
        early = x if "entered" in self._where else apart if "apart" in self._where else x.sin()
        for number, layer in enumerate(self.layers):
            x = self.run(layer, x if number == 0 or "after" in self._where else x * early)
        out: torch.Tensor = self.last(x * early if "after" in self._where else x)
        return out


@pytest.mark.parametrize(
    "where", ["entered between", "apart between", "entered after", "apart after", "made of it after"]
)
def test_5_but_not_mix_what_lies_before_and_after_a_layer(where: str) -> None:
    with pytest.raises(InputError, match="after a layer.*computes with a tensor from before.*pass_size=1"):
        check(seeded(lambda: Mixing(where)))


class HookedOutside(Turned):
    """The model puts hooks on what layers have returned."""

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = super().run(layer, x)
        _doubled(found)
        return found


def _hooked(where: str) -> Callable[[], nn.Module]:
    """Hooks that modules put on their tensors double gradients; the tail reads what has left the first layer, too."""

    def build() -> nn.Module:
        if where == "what a layer has returned":
            return HookedOutside(three())
        stack = Turned(three())
        if where == "a layer's input":
            stack.layers[0].register_forward_pre_hook(lambda layer, args: _doubled(args[0]))
        else:
            module = stack.first if where == "what enters a layer" else stack.layers[1]
            module.register_forward_hook(lambda layer, args, output: _doubled(output))
        return stack

    return seeded(build)


def _doubled(x: torch.Tensor) -> None:
    x.register_hook(lambda gradient: 2 * gradient)


def test_5_hooks_inside_of_layers_run_once() -> None:
    check(_hooked("a layer's output"))


@pytest.mark.parametrize("where", ["a layer's input", "what enters a layer", "what a layer has returned"])
def test_5_but_hooks_on_what_enters_or_leaves_a_layer_are_refused(where: str) -> None:
    with pytest.raises(InputError, match="waits for the gradient"):
        check(_hooked(where))


def test_a_hook_on_a_weight_gets_whole_gradients_or_is_refused() -> None:
    """A hook that is not linear gives something else for the parts of a sum."""
    steps = batches("gpt2", 2, steps=1)
    plan = plan_for(family("gpt2")(), steps[0][0], accumulation=2)

    def hooked(name: str) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model = family("gpt2")()
            model.get_parameter(name).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            return model

        return make

    own = hooked("transformer.h.0.mlp.c_fc.weight")
    assert in_passes(own, steps, plan).same_as(plainly(own, steps))
    with pytest.raises(InputError, match="a hook on transformer.wte.weight"):
        in_passes(hooked("transformer.wte.weight"), steps, plan)


def test_each_run_of_a_layer_adds_to_a_cache_only_it_sees() -> None:
    def make() -> nn.Module:
        model = family("llama")().eval()  # in which transformers checkpoints nothing itself
        model.config.use_cache = True
        return model

    steps = batches("llama", 2, steps=1)
    plan = plan_for(family("llama")(), steps[0][0], accumulation=2)
    assert in_passes(make, steps, plan).same_as(plainly(make, steps))


@pytest.mark.parametrize("late", [lambda x: x.register_hook(lambda gradient: 2 * gradient), lambda x: x.retain_grad()])
@pytest.mark.parametrize("layer", [0, 1])
def test_5_and_so_are_those_on_what_has_entered_a_layer(late: Callable[[torch.Tensor], Any], layer: int) -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        output = model(**batch, output_hidden_states=True)
        kept.append(output.hidden_states[layer])
        late(kept[-1])
        found: torch.Tensor = output.loss
        return found

    kept: list[torch.Tensor] = []
    make, steps = family("llama"), batches("llama", 2)
    with pytest.raises(InputError, match="waits for the gradient.*pass_size=1"):
        in_passes(make, steps, plan_for(make(), steps[0][0], accumulation=2), loss)


class Dropping(Stack):
    """Leaves out its second layer, or all that follow the first, if a micro-batch begins with a positive number."""

    def __init__(self, all_that_follow: bool) -> None:
        super().__init__(three())
        self._rest = slice(3, 3) if all_that_follow else slice(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.layers)
        kept = layers if x[0, 0] < 0 else [layers[0], *layers[self._rest]]
        x = self.first(x)
        for layer in kept:
            x = self.run(layer, x)
        out: torch.Tensor = self.last(x)
        return out


@pytest.mark.parametrize(("all_that_follow", "found"), [(False, "layers.2"), (True, "no more layers")])
def test_7_micro_batches_that_skip_layers_are_refused(all_that_follow: bool, found: str) -> None:
    steps = [[{"x": sign * torch.ones(4, 8)} for sign in (-1, 1)]]
    make = seeded(lambda: Dropping(all_that_follow))
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2)
    said = f"some micro-batches call layers.1 where others call {found}, as with LayerDrop.*pass_size=1"
    with pytest.raises(InputError, match=said):
        in_passes(make, steps, plan, square_loss)


class Drawing(Stack):
    """Multiplies by a random number after each layer."""

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(())


def test_6_each_micro_batch_has_its_random_numbers() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(int(batch["x"][0, 0].abs() * 1000))
        return square_loss(model, batch)

    with torch.random.fork_rng(devices=[]):
        check(seeded(lambda: Drawing(three())), loss, count=6)


_level: contextvars.ContextVar[int] = contextvars.ContextVar("level", default=0)


def test_8_autocast_and_context_variables_reach_the_threads_and_layers_that_run_again() -> None:
    seen = set()

    class Watching(Layer):
        def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            out = super().forward(x, *more)
            seen.add((_level.get(), self.linear(x).dtype))
            return out

    make, steps = seeded(lambda: Stack([Watching(), Watching()])), vectors(3)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=3, home="cuda")

    def inside(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square_loss(model, batch)

    def outside(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return square_loss(model, batch)

    expected = plainly(make, steps, inside)
    seen.clear()
    token = _level.set(7)
    try:
        assert in_passes(make, steps, plan, inside).same_as(expected)
        assert {kind for _, kind in seen} == {torch.bfloat16}
        found = in_passes(make, steps[:1], plan, square_loss, around=lambda: torch.autocast("cpu", torch.bfloat16))
    finally:
        _level.reset(token)
    assert {level for level, _ in seen} == {7}
    assert found.same_as(plainly(make, steps[:1], inside))
    seen.clear()
    in_passes(make, steps[:1], plan, outside, around=lambda: torch.autocast("cpu", torch.bfloat16))
    assert {kind for _, kind in seen} == {torch.float32}


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Operators, Functions])
def test_8_a_mode_that_other_threads_would_escape_is_refused(mode: Any) -> None:
    make, steps = seeded(lambda: Stack(three())), vectors(3)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=3)
    with pytest.raises(InputError, match="a mode that watches .*enter a mode inside of step_fn"), mode():
        in_passes(make, steps, plan, square_loss)


def test_8_saved_tensor_hooks_that_other_threads_would_escape_are_refused() -> None:
    make, steps = seeded(lambda: Stack(three())), vectors(3)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=3)
    said = r"such as save_on_cpu, are active around accumulate\(\).*pass_size=1"
    with pytest.raises(InputError, match=said), torch.autograd.graph.save_on_cpu():
        in_passes(make, steps, plan, square_loss)


def test_8_the_default_device_reaches_the_threads() -> None:
    seen = []

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        seen.append(torch.ones(1).device.type)
        return square_loss(model, batch)

    make, steps = seeded(lambda: Stack(three())), vectors(2, steps=1)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2)
    in_passes(make, steps, plan, loss, around=lambda: torch.device("meta"))
    assert seen == ["meta"] * 2
    with pytest.raises(RuntimeError, match="does not require grad"):
        in_passes(make, steps, plan, square_loss, around=torch.no_grad)


class Remembering(Stack):
    """Keeps something of its input for what follows the layers, in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = x.mean()
        return super().forward(x)


def test_9_state_that_a_forward_leaves_on_a_module_is_refused() -> None:
    make, steps = seeded(lambda: Remembering(three())), vectors(2, steps=1)
    with pytest.raises(InputError, match="the model keeps 'seen' from one forward.*pass_size=1"):
        plan_for(make(), steps[0][0], square_loss, accumulation=2)
    plan = plan_for(make().eval(), steps[0][0], square_loss, accumulation=2)
    with pytest.raises(InputError, match="the model keeps 'seen' from one forward.*pass_size=1"):
        in_passes(make, steps, plan, square_loss)


class InPlace(Stack):
    """Writes to the output of each layer."""

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(1.5).add_(number)


def test_10_glue_may_write_to_the_output_of_a_layer() -> None:
    check(seeded(lambda: InPlace(three())))


class Overwriting(Layer):
    """Writes to its input."""

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(1.0))


class Normed(Layer):
    """Has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Leaking(Layer):
    """Gives a tensor away that is not among its outputs."""

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        _leaked.append(x.exp())
        return super().forward(x)


_leaked: list[torch.Tensor] = []


def leaking_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    _leaked.clear()
    loss = square_loss(model, batch)
    return loss + sum((each.mean() for each in _leaked), torch.zeros(()))


@pytest.mark.parametrize(
    ("layer", "loss", "message"),
    [
        (Overwriting, square_loss, "an input of the layer layers.0 was written to in place, by the layer.*pass_size=1"),
        (Normed, square_loss, "layers.0.norm updates running statistics.*pass_size=1"),
        (Leaking, leaking_loss, "with one from inside of it that is not among its outputs.*pass_size=1"),
    ],
)
def test_10_what_cannot_be_right_is_refused_by_name(layer: Any, loss: Any, message: str) -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return x * 1  # the input of each layer is no leaf

    class Glued(Stack):
        def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return super().run(layer, between(x))

    steps = vectors(2, steps=1)
    plan = plan_for(seeded(lambda: Glued([Layer(), Layer()]))(), steps[0][0], square_loss, accumulation=2)
    make = seeded(lambda: Glued([layer(), layer()]))
    if layer is Normed:
        plan = plan_for(make().eval(), steps[0][0], square_loss, accumulation=2)
    object.__setattr__(plan, "model_fingerprint", fingerprint(make()))
    with pytest.raises(InputError, match=message):
        in_passes(make, steps, plan, loss)


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        ("before", r"a hook, or retain_grad\(\), waits for the gradient of a tensor of shape .* that enters or leaves"),
        (
            "after",
            r"an input of the layer layers.\d was written to in place, by the layer or after it, which could not",
        ),
    ],
)
def test_what_is_done_to_the_input_of_a_layer_is_refused(meddle: str, message: str) -> None:
    done: list[str] = []

    class Meddled(Stack):
        def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            if "before" in done:
                x.retain_grad()
            output = super().run(layer, x)
            if "after" in done:
                with torch.no_grad():
                    x.add_(1)
            return output

    steps, make = vectors(2, steps=1), seeded(lambda: Meddled([Layer(), Layer()]))
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2)
    done.append(meddle)
    with pytest.raises(InputError, match=message):
        in_passes(make, steps, plan, square_loss)


ASKING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "grad": torch.autograd.grad,
    "backward": lambda loss, weight: loss.backward(inputs=[weight]),
    "create_graph": lambda loss, weight: loss.backward(create_graph=True),
}


@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
@pytest.mark.parametrize("how", ASKING)
def test_10_gradients_that_code_asks_for_are_refused(how: str, name: str) -> None:
    def asking(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        loss = square_loss(model, batch)
        ASKING[how](loss, model.get_parameter(name))
        return loss

    make, steps = seeded(lambda: Stack(three())), vectors(2, steps=1)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2, home="cuda")
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"asked for inside of accumulate\(\).*pass_size=1"):
        in_passes(make, steps, plan, asking)
    assert torch.autograd._engine_run_backward is before  # type: ignore[attr-defined]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["first.weight", "layers.1.linear.weight", "last.bias"])
def test_10_a_gradient_that_is_read_before_all_have_come_is_refused(name: str, home: str) -> None:
    make, steps = seeded(lambda: Stack(three())), vectors(2, steps=1)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=2, home=home)
    module = ElixirModule(make(), plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-2))

    def reading(model: nn.Module, batch: dict[str, Any]) -> None:
        optimizer.backward(square_loss(model, batch))
        assert model.get_parameter(name).grad is None

    with pytest.raises(InputError, match=r"grad is read inside of accumulate\(\).*pass_size=1"):
        optimizer.accumulate(reading, steps[0])


def test_11_the_weights_of_the_tail_stay_while_its_forward_and_backward_alternate() -> None:
    make, steps = family("llama"), batches("llama", 6)
    report = in_passes(make, steps, plan_for(make(), steps[0][0], accumulation=6)).reports[-1]
    assert report.demand_loads == 0
    assert report.observed["loads"] == report.predicted["loads"]


def test_no_layers_that_run_again_is_refused() -> None:
    make = family("llama")
    model = make()
    model.gradient_checkpointing_disable()
    with pytest.raises(InputError, match="turn on activation checkpointing"):
        plan_for(model, batches("llama", 1)[0][0], hf_loss, accumulation=2)
