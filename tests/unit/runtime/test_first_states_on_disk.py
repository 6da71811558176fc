"""States that an optimizer's class makes itself, for chunks whose states live on a disk: the bits, and the memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.kernels import HybridAdam
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.step import first_states
from tests.common.on_disk import in_memory, on_disk
from tests.common.parity import Pair, case, make_plan

PIECE_NUMEL = 200


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_states, "PIECE_NUMEL", PIECE_NUMEL)


class Counting(torch.optim.SGD):
    """Counts its steps itself, in no state, and makes its states in the third step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                if self.steps >= 3:
                    state = self.state[weights]
                    state.setdefault("begun", self.steps)
                    state.setdefault("sum", torch.zeros_like(weights)).add_(weights.grad)
                    weights.add_(state["sum"], alpha=-group["lr"] / state["begun"])
                else:
                    weights.add_(weights.grad, alpha=-group["lr"] / self.steps)


class Listing(torch.optim.SGD):
    """Keeps a list of tensors for each weight, a state that is no flat tensor, and a count in a tensor that is no state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.count = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                sums = self.state[weights].setdefault("sums", [torch.zeros_like(weights)])
                pair = self.state[weights].setdefault("pair", torch.zeros(2, *weights.shape))
                sums[0].add_(weights.grad)
                pair[1].add_(sums[0])
                weights.sub_((sums[0] + pair[1]) * (group["lr"] / self.count))


QUICK: dict[str, Any] = {
    "counting": Counting,
    "listing": Listing,
    "centered": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1),
}
MORE: dict[str, Any] = {
    "HybridAdam": lambda parameters: HybridAdam(parameters, lr=1e-3),
    "Adadelta": torch.optim.Adadelta,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_states_made_in_pieces_have_the_bits_of_plain_pytorch(name: str, tmp_path: Path) -> None:
    """While they move between disk and memory, too, before they are made and after; but a count that is no state does
    not move along."""
    make = {**QUICK, **MORE}[name]
    it = case("gpt2", layers=1)
    plan = make_plan(it, "streamed")
    options = {"disk_folder": tmp_path, "use_fused_kernels": False}
    with Pair(it, on_disk(plan), optimizer=lambda model: make(model.parameters()), max_norm=0.5, **options) as pair:
        for there in (on_disk(plan), in_memory(plan), on_disk(plan, 2)):
            if name not in ("counting", "listing"):
                pair.module.rehome(there)
            pair.train(2)
            pair.assert_same_weights()


def watched(base: type[torch.optim.Optimizer]) -> Any:
    """The class, which notes how many bytes of states it has had in its own memory, rather than in the window's."""

    class Watched(base):  # type: ignore[misc,valid-type]
        most_bytes = 0

        @functools.wraps(base.__init__)
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._look()

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            self._look()
            return result

        def _look(self) -> None:
            values = [value for state in self.state.values() for value in state.values()]
            own = [v.nbytes for v in values if v.dim() and v.untyped_storage().nbytes() == v.nbytes]
            Watched.most_bytes = max(Watched.most_bytes, sum(own))

    Watched.__module__ = base.__module__  # its states are those of torch's class
    return Watched


@pytest.mark.parametrize("base", [torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_chunk_has_no_states_besides_those_in_the_window(base: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    it = case("gpt2", layers=1)
    plan = on_disk(make_plan(it, "streamed"))
    shards_bytes = [4 * chunk.numel for chunk in plan.chunks if chunk.trainable]
    module = ElixirModule(it.model, plan, disk_folder=tmp_path)
    cls = watched(base)
    given = cls(module.parameters(), lr=1e-3)
    cls.most_bytes = 0  # of the user's own optimizer
    optimizer = ElixirOptimizer(module, given)
    for _ in range(2):
        optimizer.backward(module(**it.inp).loss)
        optimizer.step()
        optimizer.zero_grad()
    module.settle()
    # One piece, and one element of each weight.
    most_bytes = 4 * (PIECE_NUMEL + max(len(chunk.parameters) for chunk in plan.chunks))
    assert 0 < cls.most_bytes <= most_bytes < max(shards_bytes) / 10
    module.close()
