"""Weights shown by `gathered`: what is written to them becomes the weights where that is asked for, and nowhere else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from tests.common.parity import MODES, Case, Pair, make_plan, square_loss

Write = Callable[[nn.Parameter], object]


class Net(nn.Module):
    """One table that is a chunk larger than any block, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def make_pair(mode: str, dtype: str | None = None, *, alike: bool = True) -> Pair:
    torch.manual_seed(0)
    it = Case(Net(), {"ids": torch.randint(300, (2, 5))}, square_loss)
    return Pair(it, make_plan(it, mode, unified_dtype=dtype), alike=alike)


def _optimizer_step(parameter: nn.Parameter) -> None:
    parameter.grad = None
    plain = nn.Parameter(parameter.data)  # as an optimizer of somebody else, or an average of weights, writes
    plain.grad = torch.ones_like(plain)
    torch.optim.SGD([plain], lr=0.5).step()


WRITES: dict[str, Write] = {
    "add_": lambda p: p.add_(1),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "mul": lambda p: p.__imul__(2),
    "item": lambda p: p.__setitem__(0, 3.0),
    "view": lambda p: p.view(-1).add_(1),
    "detached": lambda p: p.detach().zero_(),
    "out": lambda p: torch.add(p, 1, out=p),
    "foreach": lambda p: torch._foreach_add_([p], 1),
    "set_": lambda p: p.set_(torch.full_like(p, 2.0)),
    "data": lambda p: p.data.add_(1),
    "data item": lambda p: p.data.view(-1).__setitem__(1, 7.0),
    "new data": lambda p: setattr(p, "data", torch.full_like(p, 2.0)),
    "transposed data": lambda p: setattr(p, "data", p.data.t().contiguous().t() + 1),
    "optimizer": _optimizer_step,
    "init": lambda p: nn.init.constant_(p, 0.25),
}


def weight(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_parameter(name)


NAMES = ("table.weight", "layers.1.weight", "layers.4.weight")


@pytest.mark.parametrize("mode", MODES)
def test_without_write_nothing_is_written(mode: str) -> None:
    with make_pair(mode) as pair:
        pair.train(1)
        model = pair.module.module
        for how, name in itertools.product(WRITES, NAMES):
            with pair.module.gathered(), torch.no_grad(), contextlib.suppress(InputError):
                WRITES[how](weight(model, name))
            assert torch.equal(pair.module.state_dict()[name], weight(pair.plain, name).cpu()), (how, name)
        pair.train(2)


@pytest.mark.parametrize("mode", MODES)
def test_a_state_dict_is_loaded_into_what_is_shown_for_writing_only(mode: str) -> None:
    with make_pair(mode) as pair:
        state = {name: value + 1 for name, value in pair.plain.state_dict().items()}
        model = pair.module.module
        with pair.module.gathered(), pytest.raises((InputError, RuntimeError), match="write=True"):
            model.load_state_dict(state)
        with pair.module.gathered():
            model.load_state_dict({}, strict=False)  # writes nothing
        pair.assert_same_weights()
        with pair.module.gathered(write=True):
            model.load_state_dict(state)
        pair.plain.load_state_dict(state)


def test_memory_that_a_plain_weight_was_given_becomes_its_weights() -> None:
    """Parameters are plain ones if all is on one device, and anybody may set their `data`."""
    with make_pair("resident", alike=False) as pair:
        for model in (pair.module.module, pair.plain):
            parameter = weight(model, "layers.1.weight")
            parameter.data = parameter.data * 2
        pair.assert_same_weights()
        for model in (pair.module.module, pair.plain):
            parameter = weight(model, "layers.1.weight")
            parameter.data = parameter.data * 2
            model.get_submodule("layers.1").load_state_dict({"bias": torch.ones(16)}, strict=False)
        pair.assert_same_weights()
        pair.train(2)
        pair.assert_same_weights()
        parameter = weight(pair.module.module, "layers.1.bias")
        parameter.data = torch.zeros(3)
        with pytest.raises(InputError, match=r"layers\.1\.bias was given \[3\] values"):
            pair.module.state_dict()


def test_a_plain_weight_of_another_shape_is_refused() -> None:
    with make_pair("resident") as pair:
        mine = weight(pair.module.module, "layers.1.weight")
        foreign = [*pair.plain.layers[1].parameters(), torch.zeros(3)]
        with pytest.raises(InputError, match="3 of 4 are none"), pair.module.gathered([mine, *foreign]):
            pass
        with (
            pytest.raises(InputError, match=r"layers\.1\.weight was given \[3\] values"),
            pair.module.gathered(write=True),
        ):
            mine.data = torch.zeros(3)
