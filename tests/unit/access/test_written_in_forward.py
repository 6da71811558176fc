"""Weights that a forward writes to, as Gemma-3n does when it clamps one, end with the bits of plain PyTorch, or a
sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu
from tests.common.parity import Case, Pair, make_plan, square_loss

WIDTH, LIMIT = 8, 0.05
Write = Callable[["Layer"], object]


class Layer(nn.Module):
    """Writes to its weight before it uses it."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.average = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
        self.write: Write | None = write

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and self.write is not None:
            with torch.no_grad():
                self.write(self)
        return self.after(self.before(input) @ self.weight + self.average)  # type: ignore[no-any-return]


def _by_operator(layer: Layer) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        layer.weight.mul_(0.75)


def _by_input(layer: Layer) -> None:
    layer.weight.add_(torch.full((WIDTH,), 0.01, device=layer.weight.device))


WRITES: dict[str, Write] = {
    "data": lambda layer: layer.weight.data.clamp_(-LIMIT, LIMIT),
    "weight": lambda layer: layer.weight.clamp_(-LIMIT, LIMIT),
    "view": lambda layer: layer.weight.t().mul_(0.5),
    "row": lambda layer: layer.weight.__setitem__(0, 0.25),
    "average": lambda layer: layer.average.lerp_(layer.weight, 0.1),
    "operator": _by_operator,
    "input": _by_input,
}


def case_of(write: Write, checkpointed: bool = False) -> Case:
    """Layers whose chunks come and go."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(write) for _ in range(3))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                input = checkpoint(layer, input, use_reentrant=False) if checkpointed else layer(input)
            return input

    return Case(Net(), {"input": torch.randn(WIDTH, WIDTH)}, square_loss)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mode", ["streamed", "mixed"])
@pytest.mark.parametrize("name", WRITES)
def test_what_a_forward_writes_has_the_bits_of_plain_pytorch(name: str, mode: str) -> None:
    it = case_of(WRITES[name])
    with Pair(it, make_plan(it, mode, split_number=12)) as pair:
        pair.train(3)
        pair.assert_same_weights()
        assert pair.module.module.layers[0].weight.shape == (WIDTH, WIDTH)


def test_also_where_the_forward_runs_again_in_backward() -> None:
    it = case_of(WRITES["data"], checkpointed=True)
    with Pair(it, make_plan(it, "streamed", split_number=12)) as pair:
        pair.train(3)


def test_master_weights_follow() -> None:
    it = case_of(WRITES["data"])
    plan = make_plan(it, "streamed", split_number=12, unified_dtype=torch.bfloat16)
    module = ElixirModule(it.model, plan, device=gpu.DEVICE)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(module.parameters(), lr=0.0))
    loss = square_loss(module, {"input": gpu.there(it.inp, module.device)["input"].bfloat16()})
    optimizer.backward(loss)
    optimizer.step()
    state = module.state_dict()  # master weights in float32
    clamped = {name: value for name, value in state.items() if name.endswith(".weight") and name.count(".") == 2}
    assert len(clamped) == 3
    for value in clamped.values():
        assert value.abs().max() <= torch.tensor(LIMIT).bfloat16()
        assert (value.abs() == torch.tensor(LIMIT).bfloat16().float()).any()
        assert not torch.equal(value, value.bfloat16().float()), "what was not clamped keeps its bits"
