"""State dicts of an optimizer are those of torch.optim, out and in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from elixir import HybridAdam
from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.chunk.lanes import Emulation
from elixir.errors import CheckpointMismatch, InputError, InputTypeError
from tests.common import gpu
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import MODES, ROUNDED, Pair, adamw, case, distance, make_plan
from tests.common.resuming import Run, differing, two_groups
from tests.common.twins import step_alike


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two state dicts have the same states, bit for bit, and the same groups."""
    assert mine["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for kind, value in state.items():
            assert torch.equal(mine["state"][number][kind], value.cpu()), (number, kind)
            assert mine["state"][number][kind].shape == value.shape
    return [group["params"] for group in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]


def copy_of(value: Any) -> Any:
    return value.cpu().clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("mode", "cls"),
    [(mode, torch.optim.AdamW) for mode in MODES] + [("mixed", torch.optim.SGD)],
)
def test_it_is_that_of_torch(mode: str, cls: type, tmp_path: Path) -> None:
    it = case("cnn")
    make = two_groups(cls, momentum=0.9) if cls is torch.optim.SGD else two_groups(cls)
    with Pair(copy.deepcopy(it), make_plan(it, mode), optimizer=make) as pair:
        pair.train(3)
        assert same(pair.optimizer.state_dict(), pair.plain_optimizer.state_dict())
        state = {"model": pair.module, "optimizer": pair.optimizer}
        save_checkpoint(tmp_path / "run", state, wait=True, files=UnsyncedFiles())
        with open_checkpoint(tmp_path / "run") as saved:
            assert same(saved.optimizer_state_dict(), pair.plain_optimizer.state_dict())
        weights = pair.plain.state_dict()
        states = tree_map(copy_of, pair.plain_optimizer.state_dict())
        assert same(states, pair.optimizer.state_dict())
        # From plain PyTorch into another model under a plan, and three steps more in both.
        with Run(it, make_plan(it, "mixed"), make) as run:
            run.train(1)  # what it had is replaced
            run.module.load_state_dict(weights)
            run.optimizer.load_state_dict(states)
            plain = copy.deepcopy(it.model).to(gpu.DEVICE)
            plain.load_state_dict(weights)
            twin = step_alike(make(plain), run.module, dict(plain.named_parameters()))
            twin.load_state_dict(states)
            for _ in range(3):
                for model, optimizer in ((plain, twin), (run.module, run.optimizer)):
                    it.loss(model, run.case.inp).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert all(torch.equal(v, plain.state_dict()[n].cpu()) for n, v in run.module.state_dict().items())
            assert same(run.optimizer.state_dict(), twin.state_dict())


def test_a_step_that_is_under_way_ends_before_states_or_weights_are_loaded() -> None:
    it = case("cnn")
    with Pair(
        it, make_plan(it, "streamed"), optimizer=two_groups(), emulation=Emulation(delay_s=0.02), alike=False
    ) as pair:
        pair.train(1)
        states, weights = pair.optimizer.state_dict(), pair.module.state_dict()
        pair.backward()
        pair.optimizer.step()
        pair.optimizer.load_state_dict(states)
        assert same(pair.optimizer.state_dict(), states)
        pair.optimizer.step()
        pair.module.load_state_dict(weights)
        assert all(torch.equal(value, weights[name]) for name, value in pair.module.state_dict().items())
        pair.optimizer.step()
        with pair.module.gathered(write=True), torch.no_grad():
            for parameter in pair.module.parameters():
                parameter.zero_()
        found = pair.module.state_dict()
        assert not any(found[name].any() for name, _ in pair.plain.named_parameters())


def test_what_is_none_is_refused() -> None:
    it = case("opt")
    with Run(it, make_plan(it, "mixed"), adamw) as run:
        run.train(1)
        before = run.optimizer.state_dict()
        with pytest.raises(InputTypeError, match="param_groups"):
            run.optimizer.load_state_dict({"state": {}})
        groups = copy.deepcopy(before)
        groups["param_groups"][0]["params"].pop()
        with pytest.raises(InputError, match="groups of"):
            run.optimizer.load_state_dict(groups)
        shape = copy.deepcopy(before)
        shape["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(InputError, match=r"has shape \[3\]"):
            run.optimizer.load_state_dict(shape)
        other = copy.deepcopy(before)
        other["state"][0] = {"momentum_buffer": other["state"][0]["exp_avg"]}
        with pytest.raises(InputError, match="not one of Adam"):
            run.optimizer.load_state_dict(other)
        assert same(run.optimizer.state_dict(), before)


def _decaying(cls: type, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: cls(model.parameters(), lr=1e-2, **options)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mine", [torch.optim.AdamW, torch.optim.Adam, HybridAdam])
@pytest.mark.parametrize("theirs", [torch.optim.Adam, HybridAdam, torch.optim.AdamW])
def test_options_of_another_class_mean_what_they_mean_to_this_one(
    theirs: type, mine: type, fused: bool, tmp_path: Path
) -> None:
    """An Adam's decay is no AdamW's: each class takes the other's options as it does without a plan."""
    it, decays = case("opt", layers=1), _decaying(theirs, weight_decay=1.0)
    plain = copy.deepcopy(it.model).to(gpu.DEVICE)
    inp, weights_of_plain = gpu.there(it.inp), dict(plain.named_parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            it.loss(model, inp).backward()
            optimizer.step()
            optimizer.zero_grad()

    options = {"wrap": {"use_fused_kernels": True}} if fused else {}
    with Run(it, make_plan(it, "mixed"), decays, **options) as run:
        first, second = (step_alike(make(plain), run.module, weights_of_plain) for make in (decays, _decaying(mine)))
        train(plain, first)
        second.load_state_dict(first.state_dict())
        train(plain, second)
        train(run.module, run.optimizer)
        state, weights = run.optimizer.state_dict(), run.module.state_dict()
        save_checkpoint(tmp_path / "run", {"model": run.module, "it": run.optimizer}, wait=True, files=UnsyncedFiles())
    for saved in (True, False):
        with Run(it, make_plan(it, "mixed"), _decaying(mine), **options) as run:
            if saved:
                load_checkpoint(tmp_path / "run", {"model": run.module, "it": run.optimizer}, files=UnsyncedFiles())
            else:
                run.module.load_state_dict(weights)
                run.optimizer.load_state_dict(state)
            train(run.module, run.optimizer)
            for name, value in run.module.state_dict().items():
                expected = plain.state_dict()[name].cpu()
                if "k_proj.bias" not in name:  # whose gradient is noise
                    near = fused and distance([value], [expected]) < ROUNDED
                    assert near or torch.equal(value, expected), name


def test_options_with_which_shards_cannot_be_stepped_are_refused(tmp_path: Path) -> None:
    it, files = case("opt", layers=1), UnsyncedFiles()
    with Run(it, make_plan(it, "mixed"), _decaying(torch.optim.AdamW, amsgrad=True)) as run:
        run.train(2)
        state = run.optimizer.state_dict()
        save_checkpoint(tmp_path / "run", {"model": run.module, "it": run.optimizer}, wait=True, files=files)
    with Run(it, make_plan(it, "mixed"), adamw, wrap={"use_fused_kernels": True}) as run:
        run.train(1)
        before = run.bits()
        with pytest.raises(InputError, match="amsgrad=True"):
            run.optimizer.load_state_dict(state)
        with pytest.raises(CheckpointMismatch, match="amsgrad=True"):
            load_checkpoint(tmp_path / "run", {"model": run.module, "it": run.optimizer}, files=files)
        assert differing(run.bits(), before) == []
