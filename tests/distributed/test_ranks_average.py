"""An average of the weights on two ranks: the numbers of one, and in a checkpoint for any number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.models.step import default_input
from tests.common.ddp import plan_for
from tests.common.early import all_early
from tests.common.parity import Case, hf_loss
from tests.common.resuming import Run, two_groups
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny

DECAY = 0.9
Averages = dict[str, list[float]]


def made(kind: str, decay: float = DECAY) -> Run:
    """All ranks have the same batch, so that one rank alone trains alike but for rounding."""
    model = tiny("opt", layers=1)
    inp = default_input(model, batch=2, seq=8)
    plan = plan_for(model, inp, "mixed" if kind == "early" else kind, optimizer_type="AdamW + EMA", split_number=6)
    return Run(Case(model, inp, hf_loss), all_early(plan) if kind == "early" else plan, two_groups(), ema=decay)


def averages(run: Run) -> dict[str, torch.Tensor]:
    with run.module.gathered(ema=True):
        shown = {name: p.detach().clone() for name, p in run.module.module.named_parameters()}
        found = run.module.state_dict()
    with run.module.gathered([], ema=True):  # streamed ones lie where the weights do
        streamed = run.module.state_dict()
    assert all(torch.equal(value, found[name]) for each in (shown, streamed) for name, value in each.items())
    return found


def _train(rank: int, world_size: int, kind: str, folder: str) -> Averages:
    with made(kind) as run:
        expected = run.module.state_dict()
        for _ in range(3):
            run.step()
            now = run.module.state_dict()
            expected = {name: torch.lerp(value, now[name], 1 - DECAY) for name, value in expected.items()}
        found = averages(run)
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
        if folder:
            save_checkpoint(folder, run.state(), wait=True)
        return {name: value.flatten().tolist() for name, value in found.items()}


def _load(rank: int, world_size: int, folder: str) -> Averages:
    with made("host") as run:
        load_checkpoint(folder, run.state())
        return {name: value.flatten().tolist() for name, value in averages(run).items()}


@pytest.mark.parametrize("kind", ["mixed", "early"])
def test_two_ranks_average_as_one(kind: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    (one,) = run_ranks(1, _train, kind, "")
    two = run_ranks(2, _train, kind, folder)
    assert two[0] == two[1]
    for name, value in one.items():
        assert torch.allclose(torch.tensor(value), torch.tensor(two[0][name]), rtol=1e-4, atol=1e-6), name
    with open_checkpoint(folder) as saved:
        for name, value in two[0].items():
            key = f"ema_weights/{name}"
            assert key not in saved.index.tensors or saved.read(key).flatten().tolist() == value
        assert sum(key.startswith("ema_weights/") for key in saved.index.tensors) == len(saved.index.names)
    for ranks in (1, 2) if kind == "mixed" else ():
        assert run_ranks(ranks, _load, folder) == [two[0]] * ranks


def _differ(rank: int, world_size: int) -> str:
    with made("host", DECAY + 0.01 * rank) as run:
        try:
            run.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_different_decays_are_refused() -> None:
    assert all("ema is 0.9 on rank 0, 0.91 on rank 1" in said for said in run_ranks(2, _differ))
