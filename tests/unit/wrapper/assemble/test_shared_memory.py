"""Attributes, buffers and parameters that lie in the memory of a weight that is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.errors import InputError
from elixir.search import simple_search
from elixir.wrapper import ElixirModule
from tests.common import gpu
from tests.common.parity import MODES, Case, Pair, adamw, make_plan, square_loss, take_step

Share = Callable[["Net"], object]


class Net(nn.Module):
    """Layers, a table and a head of the same shape, and a sum with whatever shares memory."""

    def __init__(self, share: Share) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        self.plain: Any = None
        share(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        x = x + sum((each.sum() for each in self.attributes()), torch.zeros((), device=x.device))
        return self.head(x)

    def attributes(self) -> list[torch.Tensor]:
        return [self.plain] if isinstance(self.plain, torch.Tensor) else self.plain or []


KEPT: dict[str, Share] = {
    "attribute": lambda net: vars(net).update(plain=net.layers[2].weight.detach()),
    "column": lambda net: vars(net).update(plain=net.layers[2].weight.detach()[:, 3]),
    "attribute with a graph": lambda net: setattr(net, "plain", net.layers[2].weight.t()),
    "rows in a list": lambda net: setattr(net, "plain", [net.layers[2].weight.detach()[1], net.table.weight.data[2]]),
}


def _make(share: Share) -> Net:
    torch.manual_seed(0)
    return Net(share)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def _case(share: Share) -> Case:
    return Case(_make(share), {"ids": torch.arange(12).view(3, 4)}, square_loss)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("optimizer", [adamw, _sgd])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KEPT)
def test_memory_that_is_shared_has_the_bits_of_plain_pytorch(
    kind: str, mode: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Any
) -> None:
    it = _case(KEPT[kind])
    plan = make_plan(it, mode, split_number=12)
    with Pair(it, plan, plain=_make(KEPT[kind]), optimizer=optimizer) as pair:
        pair.train(3)
        pair.assert_same_weights()
        with torch.no_grad():
            assert pair.agree(pair.module(**pair.case.inp), pair.plain(**pair.case.inp))
        state = {"model": pair.module, "optimizer": pair.optimizer}
        elixir.save_checkpoint(tmp_path / "saved", state, wait=True)
        saved = {name: value.clone() for name, value in pair.module.state_dict().items()}
        losses = pair.train(2)
        elixir.load_checkpoint(tmp_path / "saved", state)
        assert all(torch.equal(saved[name], value) for name, value in pair.module.state_dict().items())
        again = []
        for _ in range(2):
            again.append(square_loss(pair.module, gpu.there(it.inp, pair.module.device)))
            take_step(pair.optimizer, again[-1])
        assert [loss.item() for loss in again] == losses
        pair.assert_same_weights()
        state_dict = pair.module.state_dict()
        pair.module.load_state_dict({name: value * 0.5 for name, value in state_dict.items()})
        pair.plain.load_state_dict({name: value * 0.5 for name, value in state_dict.items()})
        pair.train(1)


def test_weights_written_between_steps_show_under_both_names() -> None:
    it = _case(KEPT["attribute"])
    with Pair(it, make_plan(it, "streamed", split_number=12), plain=_make(KEPT["attribute"])) as pair:
        pair.train(1)
        with pair.module.gathered(write=True), torch.no_grad():
            pair.module.module.layers[2].weight.mul_(0.5)
            pair.plain.layers[2].weight.data.mul_(0.5)
            assert pair.agree(pair.module.module.plain, pair.plain.plain)
            assert pair.agree(pair.module(**pair.case.inp), pair.plain(**pair.case.inp)), "inside, too"
        with torch.no_grad():
            assert pair.agree(pair.module(**pair.case.inp), pair.plain(**pair.case.inp))
        for model in (pair.module, pair.plain):
            model.load_state_dict({"layers.2.weight": torch.ones(8, 8)}, strict=False)
        pair.train(2)


def _frozen_head(net: Net) -> None:
    net.head.weight.data = net.table.weight.data
    net.head.weight.requires_grad_(False)


def _two_heads(net: Net) -> None:
    net.head.weight.data = net.table.weight.data


def _slice(net: Net) -> None:
    net.part = nn.Parameter(net.head.weight.data[:4])


def _straddling(net: Net) -> None:
    flat = torch.randn(80)
    net.layers[2].weight.data = flat[:64].view(8, 8)
    net.plain = flat[60:70]


REFUSED: dict[str, tuple[Share, str]] = {
    "tied by data": (_two_heads, r"table\.weight and head\.weight are two .*make them one with head\.weight ="),
    "part of a weight": (_slice, r"head\.weight and part are two .*compute one from the other"),
    "frozen head": (_frozen_head, r"head\.weight lies in the memory of table\.weight.*tie the two as one"),
    "buffer": (
        lambda net: net.register_buffer("now", net.layers[2].weight.detach()[3]),
        r"now lies in the memory of layers\.2\.weight.*tie the two as one parameter, or give one of them .*now\.data =",
    ),
    "attribute over the edge": (_straddling, r"plain lies in part in the memory of layers\.2\.weight.*\.clone\(\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_two_parameters_in_one_memory_are_refused_by_both_names(kind: str) -> None:
    share, message = REFUSED[kind]
    with pytest.raises(InputError, match=message):
        simple_search(_make(share), 1, inp={"ids": torch.arange(4)}, hardware="cpu")
    apart = kind in ("tied by data", "frozen head", "buffer")
    it = _case(lambda net: None if apart else share(net))
    plan = make_plan(_case(lambda net: None), "streamed")
    if apart:
        share(it.model)
    with pytest.raises(InputError, match=message):
        ElixirModule(it.model, plan, device=gpu.DEVICE)
