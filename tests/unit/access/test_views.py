"""A view of a streamed weight shows that weight for as long as it lives, wherever the chunk is, or raises."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.access.interception import TrackedView
from elixir.errors import InputError
from tests.common import inside
from tests.common.parity import Case, Pair, make_plan, square_loss

WIDTH = 8
Forward = Callable[["Layer", torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A weight and two linear layers, which have separate chunks, and one way to use the weight."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.how = forward

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.how(self, input)


class KeepsView(torch.autograd.Function):
    """A function whose context holds the view itself, of which autograd knows nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.view = weight.t()
        ctx.save_for_backward(x)
        return x @ ctx.view

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.view.t(), gradient.t() @ x


class SavesView(torch.autograd.Function):
    """Is given a view whose chunk has left, and saves it without reading it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, view)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, view = ctx.saved_tensors
        return gradient @ view, gradient.t() @ x


@dataclass
class Output:
    """A box that is no container into which the runtime looks."""

    x: torch.Tensor
    view: torch.Tensor


class Maker(nn.Module):
    """A module that returns a view of its weight in a custom object."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.weight = layer.weight

    def forward(self, x: torch.Tensor) -> Output:
        return Output(torch.tanh(x), self.weight.t())


def same_hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def captured_by_a_closure(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    view = layer.weight.t()
    x = layer.before(x)
    x = checkpoint(lambda x: torch.tanh(x @ view), x, use_reentrant=False)  # type: ignore[no-any-return]
    return layer.after(x)


def captured_by_a_reentrant_closure(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    view = layer.weight.t()
    x = checkpoint(lambda x: torch.tanh(x @ view), layer.before(x), use_reentrant=True)
    return layer.after(x)


def under_hooks_of_the_user(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x, view = layer.before(x), layer.weight.t()
    with same_hooks():
        x = torch.tanh(x @ view)
    return layer.after(x)


def saved_on_the_cpu(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x, view = layer.before(x), layer.weight[:, 2:].T
    with torch.autograd.graph.save_on_cpu():
        x = torch.tanh(x[:, 2:] @ view)
    return layer.after(x)


def kept_by_a_context(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.after(torch.tanh(KeepsView.apply(layer.before(x), layer.weight)))


def saved_by_a_function(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    made: Output = layer.maker(x)
    return layer.after(SavesView.apply(layer.before(made.x), made.view))


def returned_in_an_object(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    made: Output = layer.maker(x)
    return layer.after(layer.before(made.x) @ made.view)


def unpacked_and_returned(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    made: Output = layer.maker(x)
    return layer.before(made.x).sum() * made.view  # elementwise, below


def in_a_checkpointed_function(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ layer.weight.T)
        return torch.tanh(layer.after(layer.before(x)))

    return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def in_a_reentrant_function(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        view = layer.weight.T
        x = torch.tanh(layer.after(layer.before(x)))
        return torch.tanh(x @ view)

    return checkpoint(run, x, use_reentrant=True)  # type: ignore[no-any-return]


def in_parts(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    parts = layer.weight.chunk(2)
    rows = list(layer.weight)
    x = layer.before(x)
    with same_hooks():
        x = torch.cat([torch.tanh(x @ part.t()) for part in parts], -1)
    return layer.after(checkpoint(lambda x: x + rows[1] * rows[-1], x, use_reentrant=False))


def of_a_view_of_the_data(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    data, detached = layer.weight.data[1:], layer.weight.detach().view(-1)
    x = layer.before(x)
    return layer.after(checkpoint(lambda x: x * data[3] + detached[2:10], x, use_reentrant=False))


FORWARDS: list[Forward] = [
    captured_by_a_closure,
    captured_by_a_reentrant_closure,
    under_hooks_of_the_user,
    saved_on_the_cpu,
    kept_by_a_context,
    saved_by_a_function,
    returned_in_an_object,
    unpacked_and_returned,
    in_a_checkpointed_function,
    in_a_reentrant_function,
    in_parts,
    of_a_view_of_the_data,
]
OPTIONS: dict[str, dict[str, Any]] = {
    "poisoned": {},
    "as it is": {"poison": False},
    "evicted": {"evict_always": True},
    "unforeseen": {"prefetch": False},
}


def case_of(forward: Forward, layers: int = 4) -> Case:
    torch.manual_seed(0)
    made = [Layer(forward) for _ in range(layers)]
    for layer in made:
        if forward in (saved_by_a_function, returned_in_an_object, unpacked_and_returned):
            layer.maker = Maker(layer)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *made)
    return Case(model, {"input": torch.randn(WIDTH, WIDTH)}, square_loss)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Steps that are large enough for a weight of another layer to show."""
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("mode", ["streamed", "mixed"])
def test_views_have_the_values_of_plain_pytorch(mode: str, forward: Forward) -> None:
    it = case_of(forward)
    plan = make_plan(it, mode, split_number=12)
    for name, options in OPTIONS.items():
        with Pair(Case(copy.deepcopy(it.model), it.inp, it.loss), plan, optimizer=sgd, **options) as pair:
            pair.train(3)
            pair.assert_same_weights()
            assert not any(type(value) is TrackedView for value in pair.module.state_dict().values()), name


def hold(net: Layer, x: torch.Tensor) -> torch.Tensor:
    """Keeps a view for a test, or uses the one that is kept."""
    kept: list[torch.Tensor] = net.__dict__.setdefault("kept", [])
    if not kept:
        kept.append(net.weight.t())
    return net.after(net.before(x) @ kept[0])


@pytest.fixture
def holding() -> Iterator[Pair]:
    it = case_of(hold, layers=3)
    with Pair(it, make_plan(it, "streamed", split_number=12), optimizer=sgd) as pair:
        for model in (pair.module.module, pair.plain):
            for layer in list(model)[1:]:
                layer.kept = []
        yield pair


def layers_of(pair: Pair) -> list[Any]:
    return list(pair.module.module)[1:]


def test_a_view_of_a_weight_that_does_not_change_lasts(holding: Pair) -> None:
    for model in (holding.module.module, holding.plain):
        for layer in list(model)[1:]:
            layer.kept = []
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(holding.module(**holding.case.inp), holding.plain(**holding.case.inp))
    assert all(type(layer.kept[0]) is TrackedView for layer in layers_of(holding))


def test_a_view_from_before_a_step_shows_the_new_weight(holding: Pair) -> None:
    holding.train(3)
    holding.assert_same_weights()


def test_a_view_from_before_a_write_shows_what_was_written(holding: Pair) -> None:
    with torch.no_grad():
        before = holding.module(**holding.case.inp)
        holding.plain(**holding.case.inp)
        with holding.module.gathered(write=True):
            layers_of(holding)[0].weight.mul_(2)
        holding.plain[1].weight.mul_(2)  # type: ignore[index]
        after = holding.module(**holding.case.inp)
        assert torch.equal(after, holding.plain(**holding.case.inp))
        assert not torch.equal(after, before)


class Returns(nn.Module):
    """Returns its weight unread, as the attention of GPT-NeoX-Japanese does with its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
        return x @ self.weight, self.bias


class Around(nn.Module):
    """Reads what the module inside returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.after = Returns(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.inside(x)
        output: torch.Tensor = self.after(y) + bias.expand_as(y)
        return output


class Positions(nn.Module):
    """Returns its weight expanded over the batch, as the learned positions of Perceiver do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(x.shape[0], -1, -1)


class Placed(nn.Module):
    """Projects the positions: nn.Linear adds its bias inside or after the product, by the layout of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.project = Positions(), nn.Linear(WIDTH, WIDTH)
        self.strides: list[tuple[int, ...]] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        positions = self.positions(input)
        self.strides.append(positions.stride())
        return input + self.project(positions)


def sparse(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x = layer.before(x)
    # Nothing is sparse while the step is traced.
    return layer.after(layer.weight @ x if x.is_meta else torch.sparse.mm(layer.weight.to_sparse(), x))


def test_backward_inside_gathered_reads_what_is_gathered() -> None:
    it = case_of(kept_by_a_context)
    with Pair(it, make_plan(it, "streamed", split_number=12), optimizer=sgd) as pair:
        losses = [it.loss(model, pair.case.inp) for model in (pair.module, pair.plain)]
        with pair.module.gathered():
            losses[0].backward()
        losses[1].backward()
        pair.step()
        pair.train(1)


# --- views that live longer than a plan, and reads in odd places -----------------------------------------------------


def _pinned(pair: Pair) -> list[int]:
    return [chunk.index for chunk in inside.chunks(pair.module) if chunk.pins]


def test_views_are_refused_once_the_model_was_closed_and_keep_no_block(holding: Pair) -> None:
    holding.train(1)
    row = layers_of(holding)[0].weight.detach()[1]
    blocks = [weakref.ref(block) for block in inside.cache(holding.module)._pool._free]
    layer = layers_of(holding)[0]
    holding.module.close()
    gc.collect()
    assert not any(block() is not None for block in blocks)
    for read in (lambda: row + 1, lambda: layer(torch.ones(2, WIDTH)), lambda: torch.ops.aten.add(row, 1)):
        with pytest.raises(InputError, match=r"view .*whose model was closed"):
            read()


def conjugated(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_complex(layer.weight.view(WIDTH, WIDTH // 2, 2)).conj()
    x = torch.view_as_complex(layer.before(x).view(WIDTH, WIDTH // 2, 2)) * numbers
    return layer.after(torch.view_as_real(x).reshape(WIDTH, WIDTH))
