"""Weights whose elements do not lie as their dimensions do, such as channels last, under a plan on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.wrapper import ElixirModule
from tests.common.ddp import PLANS, Twins, plan_for
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import case, square_loss
from tests.common.resuming import Run
from tests.common.spawn import run_ranks

FILES = UnsyncedFiles()


def _train(rank: int, world_size: int, folder: str, kind: str) -> None:
    it = case("laid out")
    inp = {"input": it.inp["input"][rank::world_size].contiguous(memory_format=torch.channels_last)}
    wanted = {name: parameter.stride() for name, parameter in it.model.named_parameters()}
    twins = Twins(it.model, inp, kind, loss=square_loss, max_norm=0.5)
    twins.train(3)
    twins.check()
    assert {name: parameter.stride() for name, parameter in twins.module.module.named_parameters()} == wanted
    state = {"model": twins.module, "optimizer": twins.optimizer}
    save_checkpoint(Path(folder, "run"), state, wait=True, files=FILES)
    values = {"weights": twins.module.state_dict(), "states": twins.optimizer.state_dict()["state"]}
    if rank == 0:
        torch.save(values, Path(folder, "values.pt"))
    twins.close()


def _load(rank: int, world_size: int, folder: str) -> None:
    for turned in (False, True):
        it = case("laid out")
        if turned:
            for parameter in it.model.parameters():
                parameter.data = parameter.data.contiguous()
        plan = plan_for(it.model, it.inp, "host", loss=square_loss, split_number=3)
        with Run(it, plan, lambda model: torch.optim.AdamW(model.parameters())) as run:
            load_checkpoint(Path(folder, "run"), {"model": run.module, "optimizer": run.optimizer}, files=FILES)
            values = torch.load(Path(folder, "values.pt"))
            weights, states = run.module.state_dict(), run.optimizer.state_dict()["state"]
            assert all(torch.equal(weights[name], value) for name, value in values["weights"].items())
            for number, kinds in values["states"].items():
                assert all(torch.equal(states[number][key], value) for key, value in kinds.items())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["mixed", *(kind for kind in PLANS if kind != "mixed")])
def test_steps_are_those_of_ddp_and_their_checkpoints_go_on_with_any_ranks_and_layout(
    kind: str, tmp_path: Path
) -> None:
    run_ranks(2, _train, str(tmp_path), kind)
    for ranks in (1, 3):
        run_ranks(ranks, _load, str(tmp_path))


def _disagree(rank: int, world_size: int) -> None:
    it = case("laid out")
    plan = plan_for(it.model, it.inp, "host", loss=square_loss)
    if rank == 1:
        it.model[0].weight.data = it.model[0].weight.data.contiguous()
    with pytest.raises(ValueError, match="0.weight do not lie in memory in the same order on ranks 0 and 1"):
        ElixirModule(it.model, plan, device="cpu")


def test_ranks_that_lay_weights_out_differently_are_refused() -> None:
    run_ranks(2, _disagree)
