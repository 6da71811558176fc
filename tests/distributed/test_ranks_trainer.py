"""transformers.Trainer on two ranks under a plan, compared with DDP: numbers, files, resuming on fewer ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.common.spawn import as_launched, run_ranks

ROOMY = {"device_memory": "64MiB", "host_budget": "64MiB"}
PLANS = {"on the host": {**ROOMY, "placement": "cpu"}, "resident": {**ROOMY, "placement": "cuda"}}
TOLERANCE = 1e-6


def trained(rank: int, world_size: int, folder: Path, elixir: dict[str, Any] | None, more: dict[str, Any]) -> Any:
    as_launched(rank, world_size)
    from elixir.integrations.transformers import ElixirTrainer
    from tests.common.trainers import PLAIN, train

    given = {} if elixir is None else {"elixir": elixir}
    done = train(PLAIN if elixir is None else ElixirTrainer, folder, **given, **more)
    if elixir is not None:
        done.trainer.elixir.module.close()
    return done.history


def close(one: Path, other: Path, name: str) -> bool:
    first, second = load_file(one / name), load_file(other / name)
    return first.keys() == second.keys() and all(
        torch.allclose(first[key], second[key], rtol=0, atol=TOLERANCE) for key in first
    )


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_train_as_ddp_does(name: str, lora: bool, tmp_path: Path) -> None:
    more = {"lora": lora, "samples": 14, "gradient_checkpointing": not lora}
    plain = run_ranks(2, trained, tmp_path / "plain", None, more, wait_s=600.0)[0]
    ours = run_ranks(2, trained, tmp_path / "ours", PLANS[name], more, wait_s=600.0)[0]
    assert [entry.keys() for entry in plain] == [entry.keys() for entry in ours]
    for one, other in zip(plain, ours, strict=True):
        assert other == pytest.approx(one, rel=0, abs=TOLERANCE)
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    assert close(tmp_path / "plain" / "final", tmp_path / "ours" / "final", file)
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    resumed = run_ranks(2, trained, tmp_path / "ours", PLANS[name], {**more, "resume": checkpoint}, wait_s=600.0)[0]
    assert resumed == ours
    alone = {**more, "resume": checkpoint, "gradient_accumulation_steps": 4}  # as many samples a step as on two ranks
    fewer = run_ranks(1, trained, tmp_path / "fewer", PLANS[name], alone, wait_s=600.0)[0]
    steps = [[entry for entry in log if "loss" in entry] for log in (ours, fewer)]
    assert len(steps[0]) == len(steps[1]) == 4
    # The third step is the first one after the checkpoint, and the last one before two ranks fill up a ragged end.
    two, one = ({name: value for name, value in log[2].items() if name != "epoch"} for log in steps)
    assert one == pytest.approx(two, rel=0, abs=TOLERANCE)


def sft_logged(rank: int, world_size: int, folder: Path, elixir: dict[str, Any] | None) -> Any:
    as_launched(rank, world_size)
    from trl import SFTTrainer

    from elixir.integrations.transformers import with_elixir
    from tests.common.trainers import logged
    from tests.unit.integrations.test_trl import fine_tuned

    kind = SFTTrainer if elixir is None else with_elixir(SFTTrainer)
    done = fine_tuned(kind, folder, elixir=elixir)
    if elixir is not None:
        done.elixir.module.close()
    return logged(done)


@pytest.mark.slow
def test_two_ranks_gather_the_metrics_of_trl_as_ddp_does(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    plain = run_ranks(2, sft_logged, tmp_path / "plain", None, wait_s=600.0)[0]
    ours = run_ranks(2, sft_logged, tmp_path / "ours", PLANS["on the host"], wait_s=600.0)[0]
    assert [entry.keys() for entry in plain] == [entry.keys() for entry in ours]
    for one, other in zip(plain, ours, strict=True):
        assert other == pytest.approx(one, rel=0, abs=TOLERANCE)
