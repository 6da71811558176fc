"""Lightning on two ranks under a plan, compared with its DDP strategy; started from outside, and spawned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.common.spawn import as_launched, run_ranks

ROOMY = {"device_memory": "64MiB", "host_budget": "64MiB"}
PLANS = {"on the host": {**ROOMY, "placement_policy": "cpu"}, "resident": {**ROOMY, "placement_policy": "cuda"}}
TOLERANCE = 1e-6


def fit(rank: int, world_size: int, folder: Path, options: dict[str, Any] | None, resume: Path | None) -> Any:
    """The log, predictions, and the weights of the last checkpoint."""
    as_launched(rank, world_size)
    from lightning.pytorch.callbacks import ModelCheckpoint

    from elixir.integrations.lightning import ElixirStrategy
    from tests.common.lit import data, fitted, states

    strategy = "ddp" if options is None else ElixirStrategy(**options)
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    done, module = fitted(strategy, folder, callbacks=[keep], devices=world_size, resume=resume)
    predicted = torch.cat(done.predict(module, data(8)))
    torch.distributed.barrier()
    weights = states(Path(keep.best_model_path or folder / "step=2.ckpt"))
    if options is not None:
        done.strategy.elixir.module.close()
    return done.logger.plain(), predicted.tolist(), {name: value.tolist() for name, value in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_fit_as_ddp_does(name: str, tmp_path: Path) -> None:
    plain = run_ranks(2, fit, tmp_path / "plain", None, None, wait_s=600.0)
    ours = run_ranks(2, fit, tmp_path / "ours", PLANS[name], None, wait_s=600.0)
    resumed = run_ranks(2, fit, tmp_path / "again", PLANS[name], tmp_path / "ours" / "step=2.ckpt", wait_s=600.0)
    assert any("val_loss" in row for row in plain[0][0])
    for one, other, again in zip(plain, ours, resumed, strict=True):
        assert len(one[0]) == len(other[0])
        for row, row_of_ours in zip(one[0], other[0], strict=True):
            assert row_of_ours == pytest.approx(row, rel=0, abs=TOLERANCE)
        assert torch.tensor(other[1]) == pytest.approx(torch.tensor(one[1]), rel=0, abs=TOLERANCE)
        for key, value in one[2].items():
            assert torch.tensor(other[2][key]) == pytest.approx(torch.tensor(value), rel=0, abs=TOLERANCE)
        assert again[1] == other[1]  # resumed amid of it, to the bit


@pytest.mark.slow
def test_weights_come_back_from_ranks_that_were_spawned(tmp_path: Path) -> None:
    from elixir.integrations.lightning import ElixirStrategy
    from tests.common.lit import fitted

    more = {"devices": 2, "logger": False, "enable_checkpointing": False}
    _, plain = fitted("ddp_spawn", tmp_path, **more)
    _, ours = fitted(ElixirStrategy(start_method="spawn", **PLANS["on the host"]), tmp_path, **more)
    found = dict(ours.named_parameters())
    assert all(torch.allclose(found[name], value, rtol=0, atol=TOLERANCE) for name, value in plain.named_parameters())
