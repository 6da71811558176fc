"""Arguments and states that make no sense are refused in words."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.checkpoint import save_checkpoint
from elixir.errors import CheckpointError, InputError, InputTypeError, StateError
from elixir.wrapper.assemble.frozen_weights import safetensors_in
from elixir.wrapper.assemble.weight_source import SafetensorsFiles
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.run_options import folders_of
from elixir.wrapper.step.rules import Inputs
from tests.common import inside
from tests.common.parity import Case, Pair, make_plan, square_loss
from tests.common.user_optimizers import Own


def made(optimizer: Any = None, *, compiles: bool = False) -> Pair:
    it = Case(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), {"input": torch.randn(2, 8)}, square_loss)
    if compiles:
        it.model[0].compile(backend="eager")  # type: ignore[index]
    return Pair(it, make_plan(it, "streamed"), optimizer=optimizer, device="cpu")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with made() as found:
        yield found


def test_an_optimizer_takes_losses_and_has_no_other_names(pair: Pair) -> None:
    with pytest.raises(InputTypeError, match="loss must be the tensor that the model's outputs lead to, got float"):
        pair.optimizer.backward(3.0)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'lr'"):
        _ = pair.optimizer.lr


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied(pair: Pair, how: Callable[[Any], Any]) -> None:
    given = torch.optim.SGD(pair.module.module.parameters(), lr=0.1)
    given.state = pair.optimizer.state  # as that of the optimizer that was wrapped
    for optimizer in (pair.optimizer, given) if how is not copy.copy else (pair.optimizer,):
        with pytest.raises(InputError, match=r"cannot be copied or pickled.*: save state_dict\(\), and load it into"):
            how(optimizer)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_checkpointed_function_that_does_something_else_again_has_the_error_of_torch(*, compiles: bool) -> None:
    """Unless layers are compiled: then the compiler is the likely cause."""
    calls: list[None] = []

    def other(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x.sin().cos() if len(calls) == 1 else x.sin()

    x = torch.ones(2, requires_grad=True)
    loss = checkpoint(other, x, use_reentrant=False).sum()
    with made(compiles=compiles) as pair:
        if compiles:
            with pytest.raises(InputError, match="a compiled layer checkpoints activations outside of its graph"):
                pair.optimizer.backward(loss)
        else:
            with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different number of tensors"):
                pair.optimizer.backward(loss)


def test_an_early_update_needs_a_second_set_of_states(pair: Pair) -> None:
    shard = inside.shards(pair.optimizer)[0]
    with pytest.raises(StateError, match="rank 0: chunk 0 has no second set of states that is free"):
        shard.begin_early(Inputs([], None, 1.0, [], writes=0, changes=0))


def test_a_checkpoint_is_of_one_module_and_its_optimizers(pair: Pair, tmp_path: Path) -> None:
    with made() as other, pytest.raises(InputError, match="'theirs' is an optimizer of another ElixirModule"):
        save_checkpoint(tmp_path, {"model": pair.module, "theirs": other.optimizer})


def test_the_state_of_a_loss_scale_is_whole() -> None:
    with pytest.raises(InputError, match="growth_interval must be 1 step or more, got 0"):
        LossScale(True, 2.0, 0)
    for state in (
        {},
        {"value": "much", "growth_interval": 2, "good_steps": 1},
        {"value": 2.0, "growth_interval": None},
    ):
        with pytest.raises(InputError, match="not the state of a loss scale"):
            LossScale(True, 2.0, 5).load(state)


def test_folders_and_files_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputTypeError, match=r"disk_folder must be a folder or a list of folders, got \[3\]"):
        folders_of([3])  # type: ignore[list-item]
    for weights, found in ((None, "nothing"), ({"w": torch.ones(1)}, "a state dict")):
        with pytest.raises(InputError, match=f"name these files.*found {found}"):
            safetensors_in(weights)
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InputError, match=r"w is in .*a.safetensors and in .*b.safetensors; give only one of them"):
        SafetensorsFiles([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match="needs the package safetensors"):
        SafetensorsFiles(tmp_path / "a.safetensors")


class Labelled(Own):
    """Keeps a state that no checkpoint holds."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameters in self.stepped():
            for p in parameters:
                self.state[p][group["kind"]] = group["value"]
        super().step()


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("label", "x", "state 'label' of 0.weight is a str, which cannot be saved"),
        ("odd", torch.zeros(3), r"state 'odd' of 0.weight has shape \[3\], neither that of its weights nor a number"),
        ("step", 0.5, "state 'step' of 0.weight is 0.5, expected a whole number"),
    ],
)
def test_a_state_that_a_checkpoint_cannot_hold_is_named(kind: str, value: Any, words: str, tmp_path: Path) -> None:
    with made(lambda model: Labelled(model.parameters(), kind=kind, value=value)) as pair:
        pair.train(1)
        with pytest.raises(CheckpointError, match=words):
            save_checkpoint(tmp_path, {"model": pair.module, "optimizer": pair.optimizer}, wait=True)
