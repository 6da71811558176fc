"""Traps for micro-batches that pass a layer together: each case is right to the bit, or refused with a reason."""

from __future__ import annotations

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


class Tied(Stack):
    """The input layer's weight is the output layer's, and one layer is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x).expand(-1, 8)
        out: torch.Tensor = self.first(self.run(self.layers[0], x))
        return out


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_3_weights_of_several_stages_are_summed_as_in_a_loop(home: str) -> None:
    check(seeded(lambda: Tied(three())), count=4, steps=vectors(4, steps=3), home=home)


class Scaled(Stack):
    """Reads a weight of a layer before the layers run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.layers[1].linear.weight.abs().mean())


def test_3_but_not_before_their_module_where_nothing_watches_them() -> None:
    make, steps = seeded(lambda: Scaled(three())), vectors(4)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=4, home="cuda")
    with pytest.raises(InputError, match=r"before a layer read layers\.1\.linear\.weight, .* call the module"):
        in_passes(make, steps, plan, square_loss)


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


def test_no_layers_that_run_again_is_refused() -> None:
    make = family("llama")
    model = make()
    model.gradient_checkpointing_disable()
    with pytest.raises(InputError, match="turn on activation checkpointing"):
        plan_for(model, batches("llama", 1)[0][0], hf_loss, accumulation=2)


def test_every_micro_batch_of_every_pass_draws_other_numbers() -> None:
    drawn: list[float] = []

    def noisy(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        drawn.append(torch.rand(()).item())
        return square_loss(model, batch)

    make, steps = seeded(lambda: Stack(three())), vectors(3, steps=2)
    plan = plan_for(make(), steps[0][0], square_loss, accumulation=3)
    in_passes(make, steps, plan, noisy)
    assert len(set(drawn)) == 6
    before = torch.get_rng_state()
    in_passes(make, steps, plan, square_loss)  # draws none
    assert torch.equal(torch.get_rng_state(), before)
