"""Uses that would silently go wrong are right, or refused with a sentence that says what to do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.wrapper import ElixirModule
from tests.common import gpu, inside
from tests.common.parity import Case, Pair, make_plan


class Net(nn.Module):
    """Four layers, and a place for a test to do something in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.middle: Callable[[Any, torch.Tensor], Any] = lambda net, x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).tanh())
        x = self.middle(self, x)
        return self.last(self.third(x.tanh()))


def net_case(model: nn.Module | None = None) -> Case:
    torch.manual_seed(0)
    return Case(model or Net(), {"x": torch.randn(4, 8)}, lambda model, inp: model(**inp).square().mean())


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Streamed: one layer in the blocks at a time."""
    it = net_case()
    with Pair(it, make_plan(it, "streamed", split_number=4)) as made:
        made.train(1)
        yield made


@pytest.fixture
def mixed() -> Iterator[Pair]:
    it = net_case()
    with Pair(it, make_plan(it, "mixed", split_number=4)) as made:
        made.train(1)
        yield made


def weights(pair: Pair) -> dict[str, nn.Parameter]:
    return dict(pair.module.module.named_parameters())


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "function": torch.sum,
    "method": lambda p: p.norm(),
    "data": lambda p: p.data + 1,
    "detach": lambda p: p.detach().clone(),
    "index": lambda p: p[0].sum(),
    "copy": copy.deepcopy,
}
TAKES: dict[str, Callable[[nn.Parameter], object]] = {
    "numpy": lambda p: p.detach().numpy(),
    "pointer": lambda p: p.data_ptr(),
    "storage": lambda p: p.data.untyped_storage(),
}


@pytest.mark.parametrize("how", READS)
def test_weights_may_be_read_outside(pair: Pair, how: str) -> None:
    for _ in range(2):
        pair.train(1)
        found, expected = (READS[how](each) for each in (weights(pair)["second.weight"], pair.plain.second.weight))
        assert pair.agree(found, expected)  # type: ignore[arg-type]
        assert not any(chunk.pins for chunk in inside.chunks(pair.module))


@pytest.mark.parametrize("how", TAKES)
def test_memory_of_weights_cannot_be_taken_outside(pair: Pair, how: str) -> None:
    with pytest.raises(InputError, match="outside of the model's forward.*gathered"):
        TAKES[how](weights(pair)["second.weight"])
    pair.train(1)


def test_other_memory_of_a_weight_and_writes_that_its_graph_needs_are_refused(pair: Pair) -> None:
    parameter = weights(pair)["second.weight"]
    with pytest.raises(InputError, match=r"\.data .* parameter\.copy_"):
        parameter.data = torch.ones(8, 8)
    with torch.no_grad(), pytest.raises(InputError, match=r"set_\(\), .* parameter\.copy_"):
        parameter.set_(torch.ones(8, 8))  # PyTorch calls no torch function for it
    with pair.module.gathered():
        mine = copy.deepcopy(parameter)
    assert type(mine) is nn.Parameter
    assert pair.agree(mine, pair.plain.second.weight)
    for model in (pair.module.module, pair.plain):
        model.middle = lambda net, x: x.exp().add_(1)  # exp saved what add_ changes
    for model in (pair.module, pair.plain):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pair.case.loss(model, pair.case.inp).backward()
    for model in (pair.module.module, pair.plain):
        model.middle = lambda net, x: x
    pair.optimizer.zero_grad()
    pair.plain_optimizer.zero_grad()
    pair.train(2)
    loss = pair.case.loss(pair.module, pair.case.inp)
    with torch.no_grad(), pair.module.gathered(write=True):
        for model in (pair.module.module, pair.plain):
            model.get_parameter("third.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_are_printed(pair: Pair) -> None:
    parameter = weights(pair)["second.weight"]
    assert "requires_grad=True" in repr(parameter)
    with pair.module.gathered([parameter]):
        assert "requires_grad=True" in repr(parameter)
        assert "nan" not in repr(parameter)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "mul_": lambda p: p.mul_(0.5),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "init": lambda p: nn.init.constant_(p, 0.25),
    "index": lambda p: p.__setitem__(0, 2.0),
    "operator": lambda p: p.__iadd__(1.0),
    "out": lambda p: torch.add(torch.ones_like(p), 1.0, out=p),
    "average": lambda p: p.lerp_(torch.zeros_like(p), 0.1),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
}


@pytest.mark.parametrize("how", WRITES)
def test_weights_are_written_inside_gathered_and_nowhere_else(mixed: Pair, how: str) -> None:
    for name, parameter in weights(mixed).items():
        chunk = next(c for c in inside.chunks(mixed.module) if any(s.name == name for s in c.slots))
        if inside.is_ordinary(mixed.module, chunk):
            continue
        with torch.no_grad():
            with pytest.raises(InputError, match=r"write=True"):
                WRITES[how](parameter)
            with pytest.raises(InputError, match=r"write=True"), mixed.module.gathered([parameter]):
                WRITES[how](parameter)
    mixed.assert_same_weights()
    with torch.no_grad(), mixed.module.gathered(write=True):
        for model in (mixed.module.module, mixed.plain):
            for parameter in model.parameters():
                WRITES[how](parameter)
    mixed.assert_same_weights()
    mixed.train(2)


def test_forward_and_backward_inside_gathered(mixed: Pair) -> None:
    with mixed.module.gathered():
        mixed.backward()
        with pytest.raises(InputError, match="inside gathered"):
            mixed.optimizer.step()
    mixed.step()
    with mixed.module.gathered():
        mine, plain = (mixed.case.loss(model, mixed.case.inp) for model in (mixed.module, mixed.plain))
    mine.backward()
    plain.backward()
    mixed.step()
    mixed.train(2)


def test_a_step_between_forward_and_backward_raises_as_in_pytorch(mixed: Pair) -> None:
    losses = [mixed.case.loss(model, mixed.case.inp) for model in (mixed.module, mixed.plain)]
    mixed.train(1)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    mixed.optimizer.zero_grad()
    mixed.plain_optimizer.zero_grad()
    mixed.train(2)


class Renormed(nn.Module):
    """A module whose forward writes to weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.embed = nn.Embedding(8, 4, max_norm=0.1)
        self.bag = nn.EmbeddingBag(8, 4, max_norm=0.2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embed(ids) + self.bag(ids.view(2, 2)).sum())


RENORMED: dict[str, dict[str, Any]] = {
    "streamed": {},
    "resident": {"resident": True, "weight_home": "device", "state_home": "device"},
    "states on the host": {"resident": True, "weight_home": "device", "state_home": "host"},
    "states on a disk": {"resident": True, "weight_home": "device", "state_home": "disk"},
}


@pytest.mark.parametrize("homes", RENORMED)
def test_embeddings_that_renormalise_their_weights_have_the_bits_of_plain_pytorch(homes: str, tmp_path: Any) -> None:
    it = Case(Renormed(), {"ids": torch.arange(4)}, lambda model, inp: model(**inp).square().sum())
    plan = make_plan(it, "streamed", split_number=2)
    plan = replace(plan, chunks=tuple(replace(chunk, **RENORMED[homes]) for chunk in plan.chunks))
    options = {"disk_folder": tmp_path} if plan.uses_disk else {}
    with Pair(it, plan, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.5), **options) as pair:
        pair.train(3)


def test_a_penalty_on_gradients_and_weights_has_the_bits_of_plain_pytorch() -> None:
    def penalised(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
        x = inp["x"].clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        weights = sum((parameter**2).sum() for parameter in model.parameters())
        return (y.square().mean() + (slope.norm(dim=1) - 1).square().mean() + 0.01 * weights).sum()

    it = net_case()
    plan = make_plan(it, "streamed", split_number=4)
    for options in ({}, {"evict_always": True}, {"prefetch": False}):
        with Pair(Case(copy.deepcopy(it.model), it.inp, penalised), plan, **options) as pair:  # type: ignore[arg-type]
            pair.train(3)
            pair.assert_same_weights()


def test_functions_that_autograd_cannot_stream_are_refused(pair: Pair) -> None:
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.grad(lambda x: pair.module(x).sum())(pair.case.inp["x"])
    with pytest.raises(InputError, match=r"torch\.func\.jvp and jacfwd cannot"):
        torch.func.jvp(pair.module, (pair.case.inp["x"],), (torch.ones_like(pair.case.inp["x"]),))
    first = pair.module.module.first
    for transform in (torch.func.jacrev, lambda f: torch.func.grad(lambda x: f(x).sum()), torch.func.jacfwd):
        handle = first.register_forward_pre_hook(lambda module, args, t=transform: t(module.forward)(args[0]) and None)
        with pytest.raises(InputError, match=r"torch\.func"):
            pair.module(**pair.case.inp)
        handle.remove()
    with pytest.raises(InputError, match="autocast.*unified_dtype"), torch.autocast(gpu.DEVICE, torch.bfloat16):
        pair.module(**pair.case.inp)
    pair.optimizer.zero_grad()
    pair.train(2)


def test_cannot_be_copied_pickled_or_wrapped(pair: Pair) -> None:
    for module in (pair.module, pair.module.module):
        with pytest.raises(InputError, match="copied|outside"):
            copy.deepcopy(module)
        with pytest.raises(InputError, match="pickled|outside"):
            pickle.dumps(module)
        with pytest.raises(InputError, match="pickled|outside"):
            torch.save(module, io.BytesIO())
    # The first thing that DistributedDataParallel asks a module for, once it has a process group.
    with pytest.raises(InputError, match="leave out DistributedDataParallel"):
        hasattr(pair.module, "_ddp_params_and_buffers_to_ignore")
    with pytest.raises(InputError, match="this ElixirModule is run by an ElixirModule already"):
        ElixirModule(pair.module, pair.plan)
    with pytest.raises(InputTypeError, match=r"must be an nn\.Module, got dict"):
        ElixirModule(vars(pair.plain), pair.plan)  # type: ignore[arg-type]
    pair.train(2)


def test_inference_mode_between_steps(mixed: Pair) -> None:
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(mixed.module(**mixed.case.inp), mixed.plain(**mixed.case.inp))
        mixed.train(1)
