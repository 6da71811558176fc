"""Weights that are read where no torch function announces it: right numbers, or an error with the weight's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.errors import InputError
from tests.common import gpu
from tests.common.parity import Case, Pair, make_plan, square_loss

WIDTH = 8
Forward = Callable[["Layer", torch.Tensor], torch.Tensor]


@torch.jit.script
def bias_gelu(bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@torch.jit.script
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


@torch.jit.script
def product_of_all(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


@torch.jit.script
def transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t()


@torch.library.custom_op("elixir_test::product", mutates_args=())
def custom_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@custom_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _custom_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = ctx.saved_tensors
    return gradient @ weight.t(), x.t() @ gradient


custom_product.register_autograd(
    _custom_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)

traced_product = torch.jit.trace(lambda x, w: torch.sin(x @ w) * w[0], (torch.ones(4, WIDTH), torch.ones(WIDTH, WIDTH)))


@pytest.fixture(autouse=True)
def unfused() -> Iterator[None]:
    """On a GPU, TorchScript fuses the operators of a function that has run once or twice, which then rounds otherwise."""
    fuses = torch._C._jit_texpr_fuser_enabled()
    torch._C._jit_set_texpr_fuser_enabled(False)
    yield
    torch._C._jit_set_texpr_fuser_enabled(fuses)


class Layer(nn.Module):
    """Two weights and two linear layers, which have separate chunks, and one way to use the weights."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 3)
        self.stack = nn.Parameter(torch.randn(5, WIDTH, WIDTH) / 3)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.how = forward

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.how(self, input)


def around(use: Forward) -> Forward:
    """`use` between two layers whose chunks come into the same blocks."""
    return lambda layer, x: layer.after(use(layer, layer.before(x)))


def stale_view(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    view = layer.weight.t()
    return product(layer.before(x), view)


def view_from_a_script(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    view = transposed(layer.weight)
    return layer.before(x) @ view


def from_inside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Like C++ that calls operators."""
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(x, layer.weight, layer.bias)


def ensemble(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    def one(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer.before, {"weight": weight, "bias": layer.bias}, (x,))

    return torch.vmap(one)(layer.stack).mean(0)


FORMS: dict[str, Forward] = {
    "script": around(lambda layer, x: bias_gelu(layer.bias, product(x, layer.weight))),
    "script_list": around(lambda layer, x: product_of_all(x, [layer.weight, layer.weight])),
    "traced": around(lambda layer, x: traced_product(x, layer.weight)),
    "twice": around(lambda layer, x: product(torch.sin(x @ layer.weight), layer.weight)),
    "checkpoint": around(
        # (what a checkpoint recomputes last must not be TorchScript, which plain PyTorch cannot stop there)
        lambda layer, x: checkpoint(lambda y: torch.sin(product(y, layer.weight)), x, use_reentrant=False)  # type: ignore[arg-type, return-value]
    ),
    "reentrant": around(
        lambda layer, x: checkpoint(lambda y: product(y, layer.weight), x, use_reentrant=True)  # type: ignore[arg-type, return-value]
    ),
    "stale_view": stale_view,
    "view_from_a_script": view_from_a_script,
    "vmap": around(lambda layer, x: torch.vmap(lambda w: torch.tanh(x @ w))(layer.stack).mean(0)),
    "vmap_in_the_middle": around(lambda layer, x: torch.vmap(lambda w: x[:, :5] @ w, in_dims=1)(layer.stack).mean(0)),
    "vmap_of_a_view": around(lambda layer, x: torch.vmap(lambda w: torch.tanh(x * w))(layer.weight.t()).mean(0)),
    "ensemble": around(ensemble),
    "custom_op": around(lambda layer, x: custom_product(x, layer.weight)),
    "overload": around(lambda layer, x: torch.ops.aten.mm.default(x, layer.weight)),
    "operators": around(from_inside),
}


def case_of(form: Forward, *, frozen: bool = False) -> Case:
    torch.manual_seed(0)
    model = Layer(form)
    for parameter in (model.weight, model.stack, model.bias) if frozen else ():
        parameter.requires_grad_(False)
    return Case(model, {"input": torch.randn(4, WIDTH)}, square_loss)


def trains(it: Case, mode: str, plain: nn.Module | None = None) -> None:
    with Pair(it, make_plan(it, mode, split_number=20), plain=plain, evict_always=True) as pair:
        pair.train(4)
        pair.assert_same_weights()
        with torch.no_grad():
            assert torch.equal(pair.module(**pair.case.inp), pair.plain(**pair.case.inp))


@pytest.mark.parametrize("name", FORMS)
def test_trains_with_the_bits_of_plain_pytorch(name: str) -> None:
    trains(case_of(FORMS[name]), "streamed")


def test_outside_of_a_forward_it_is_read_as_well_and_not_written() -> None:
    it = case_of(FORMS["script"])
    with Pair(it, make_plan(it, "streamed", split_number=20)) as pair:
        pair.train(1)
        x, mine, plain = torch.ones(4, WIDTH, device=pair.module.device), pair.module.module, pair.plain
        assert torch.equal(product(x, mine.weight), product(x, plain.weight))
        refused = pytest.raises(InputError, match=r"mul_ writes in place")
        with refused, torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            pair.module.module.weight.mul_(1.0)
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(x @ mine.weight, x @ plain.weight)
        assert torch.equal(torch.vmap(torch.sin)(mine.stack), torch.vmap(torch.sin)(plain.stack))
        pair.train(2)


@gpu.on_the_cpu("only there Python reads the bytes at an address")
def test_code_that_takes_addresses_is_refused_with_the_name_and_right_after_a_touch() -> None:
    """It is no operator and no torch function: what a compiled extension does with ``data_ptr<float>()``."""

    def takes(layer: Layer, x: torch.Tensor, *, touch: bool) -> torch.Tensor:
        if touch:
            layer.weight.data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            assert bool(layer.weight.data_ptr()) == touch, "an untyped address is null"
            first = layer.weight.untyped_storage()
            at = layer.weight.storage_offset() * 4
            values = torch.tensor([first[at + place] for place in range(4)], dtype=torch.uint8).view(torch.float32)
        return x * values

    it = case_of(around(lambda layer, x: x @ layer.weight))
    with Pair(it, make_plan(it, "streamed", split_number=20), evict_always=True) as pair:
        pair.module.module.how = around(lambda layer, x: takes(layer, x, touch=False))
        with pytest.raises(
            InputError, match=r"compiled extension, reads a weight that is not there: one of weight.*data_ptr"
        ):
            pair.module(**pair.case.inp)
        for model in (pair.module.module, pair.plain):
            model.how = around(lambda layer, x: takes(layer, x, touch=True))
        pair.train(2)


class TakesAddress(nn.Linear):
    taken: tuple[nn.Parameter, ...] = ()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = super().forward(input)  # its own weights are there
        with torch._C.DisableTorchFunctionSubclass():
            return y * sum(float(weight.untyped_storage()[0]) for weight in self.taken) if self.taken else y


@gpu.on_the_cpu("only there Python reads the bytes at an address")
def test_code_that_takes_the_address_of_a_weight_of_another_layer_is_refused_with_a_name() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), TakesAddress(WIDTH, WIDTH, bias=False))
    it = Case(model, {"input": torch.randn(4, WIDTH)}, square_loss)
    with Pair(it, make_plan(it, "streamed", split_number=20), evict_always=True) as pair:
        pair.train(1)
        first, last = pair.module.module
        last.taken = (first.weight,)
        with pytest.raises(InputError, match=r"one of 1\.weight, 0\.weight\."):
            pair.module(**pair.case.inp)
        last.taken = ()
        pair.train(1)


EXTENSION = """
#include <torch/extension.h>

// Calls operators, and is a node of autograd that saves the weight.
struct Product : torch::autograd::Function<Product> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x, torch::Tensor weight) {
    ctx->save_for_backward({x, weight});
    return x.mm(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list g) {
    auto saved = ctx->get_saved_variables();
    return {g[0].mm(saved[1].t()), saved[0].t().mm(g[0])};
  }
};
torch::Tensor product(torch::Tensor x, torch::Tensor weight) { return Product::apply(x, weight); }

// Takes the address.
torch::Tensor scaled(torch::Tensor x, torch::Tensor weight) { return x * weight.data_ptr<float>()[0]; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("product", &product);
  m.def("scaled", &scaled);
}
"""


@pytest.mark.slow
def test_a_compiled_extension(tmp_path: Path) -> None:
    from torch.utils.cpp_extension import load_inline

    extension = load_inline("elixir_test_extension", EXTENSION, build_directory=str(tmp_path), extra_cflags=["-O0"])
    for mode in ("streamed", "mixed"):
        trains(case_of(around(lambda layer, x: extension.product(x, layer.weight))), mode)
    it = case_of(around(lambda layer, x: x @ layer.weight))
    with Pair(it, make_plan(it, "streamed", split_number=20), evict_always=True) as pair:
        pair.module.module.how = around(lambda layer, x: extension.scaled(x, layer.weight))
        with pytest.raises(InputError, match="one of weight"):
            pair.module(**pair.case.inp)


def test_data_that_is_taken_unannounced_is_refused_by_who_reads_it() -> None:
    def unannounced(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x @ (layer.weight.data.t() + 1)

    it = Case(Layer(around(unannounced)), {"input": torch.randn(3, WIDTH)}, square_loss)
    with Pair(it, make_plan(it, "streamed")) as pair, pytest.raises(InputError, match="no torch function announces"):
        pair.backward()
