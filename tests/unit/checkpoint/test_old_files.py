"""Checkpoints and profiles that earlier commits wrote are read with the bits that those commits held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elixir import HardwareProfile, Plan, load_checkpoint, open_checkpoint
from elixir.search import plan_from_trace
from tests.common.samples import make_trace
from tests.common.spawn import run_ranks
from tests.old_files.make import RUNS, STEPS, batch, loss_of, plan_of, user_state, wrapped

COMMITS = sorted(
    path for path in (Path(__file__).parents[2] / "old_files").iterdir() if (path / "profile.json").exists()
)
each_commit = pytest.mark.parametrize("folder", COMMITS, ids=lambda folder: folder.name)


def different(found: Any, held: Any, where: str = "") -> list[str]:
    """The paths at which two nests of dicts and lists differ; tensors by dtype, shape and bits."""
    if isinstance(held, dict):
        keys = [] if found.keys() == held.keys() else [f"{where}: {sorted(found)} is not {sorted(held)}"]
        return keys + [
            each for key in held if key in found for each in different(found[key], held[key], f"{where}/{key}")
        ]
    if isinstance(held, (list, tuple)):
        pairs = enumerate(zip(found, held, strict=True))
        return [each for index, (one, other) in pairs for each in different(one, other, f"{where}/{index}")]
    if isinstance(held, torch.Tensor):
        same = found.dtype == held.dtype and torch.equal(found, held)
    else:
        same = found == held
    return [] if same else [f"{where}: {found} is not {held}"]


def resumed(rank: int, world_size: int, folder: Path, name: str, plan: Plan, scratch: str) -> list[str]:
    """Loads a checkpoint, lists where it differs from the values that its writer held, and makes a step."""
    module, optimizer = wrapped(plan, scratch)
    state = {"model": module, "optimizer": optimizer, **dict.fromkeys(user_state())}
    loaded = load_checkpoint(folder / name, state)
    held = torch.load(folder / f"{name}.pt", weights_only=True)
    found = different(module.state_dict(), held["weights"], "weights")
    found += different(optimizer.state_dict(), held["optimizer"], "optimizer")
    if loaded.step != STEPS:
        found.append(f"step {loaded.step}")
    optimizer.backward(loss_of(module, batch()))
    optimizer.step()
    module.close()
    return found


@each_commit
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_has_the_bits_that_were_saved(folder: Path, name: str, tmp_path: Path) -> None:
    options = {key: value for key, value in RUNS[name].items() if key not in ("ranks", "homes")}
    with torch.random.fork_rng(devices=[]):  # a checkpoint brings random states
        assert resumed(0, 1, folder, name, plan_of(**options), str(tmp_path)) == []


@each_commit
@pytest.mark.parametrize("name", ["two_ranks", "one_rank"])
def test_so_it_has_on_two_ranks(folder: Path, name: str, tmp_path: Path) -> None:
    assert run_ranks(2, resumed, folder, name, plan_of(ranks=2), str(tmp_path)) == [[], []]


@each_commit
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_opens_without_a_model(folder: Path, name: str) -> None:
    held = torch.load(folder / f"{name}.pt", weights_only=True)
    with open_checkpoint(folder / name) as saved:
        weights = saved.weights()
        # Frozen weights have no masters, and are read in their own dtype.
        read = {key: weights[key].to(value.dtype) for key, value in held["weights"].items()}
        assert different(read, held["weights"]) == []


@each_commit
def test_a_profile_is_planned_with(folder: Path) -> None:
    profile = HardwareProfile.load(folder / "profile.json")
    assert profile.early_kept is None
    assert plan_from_trace(make_trace(layers=2), profile, 1, host_budget="1GiB").predicted.step_s > 0
