"""Trainer, Accelerate and Lightning on two ranks, and on two replicas of two, under a plan log what they do with DDP, briefly.

One start of ranks for all three, since the imports take most of the time; files, resuming, adapters and other plans are
in the slow tests of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.common.spawn import as_launched, run_ranks

ON_HOST = {"device_memory": "64MiB", "host_budget": "64MiB", "placement": "cpu"}
TOLERANCE = 1e-6


def of_trainer(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Both logs: a ragged accumulation, clipping and a schedule."""
    from elixir.integrations.transformers import ElixirTrainer
    from tests.common.trainers import PLAIN, logged, make

    more = {"samples": 14 * options["replicas"], "num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
    more["load_best_model_at_end"] = False
    plain = make(PLAIN, folder / "plain", **more)
    plain.train()
    ours = make(ElixirTrainer, folder / "ours", elixir=options, **more)
    ours.train()
    assert ours.elixir.module.plan.replicas == options["replicas"]
    ours.elixir.module.close()
    return logged(plain), logged(ours)


def of_accelerate(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Losses and norms of an epoch."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from elixir.integrations.accelerate import ElixirAccelerator
    from tests.common.accelerated import Loop

    found = []
    for kind, more in ((Accelerator, {}), (ElixirAccelerator, {"elixir": options})):
        AcceleratorState._reset_state(True)
        loop = Loop(kind(cpu=True, gradient_accumulation_steps=2, **more), samples=12 * options["replicas"])
        found.append([{"value": value} for value in loop.epoch()])
    assert loop.accelerator.elixir.module.plan.replicas == options["replicas"]
    loop.accelerator.elixir.module.close()
    return found[0], found[1]


def of_lightning(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Both logs: training, validation, the learning rate."""
    from elixir.integrations.lightning import ElixirStrategy
    from tests.common.lit import fitted

    found: list[Any] = []
    ranks = torch.distributed.get_world_size()
    more = {"devices": ranks, "max_epochs": 1, "enable_checkpointing": False, "val_check_interval": 6 // ranks}
    for strategy in ("ddp", ElixirStrategy(**options)):
        done, _ = fitted(strategy, folder, **more)
        found.append(done.logger.plain())
    assert strategy.elixir.module.plan.replicas == options["replicas"]
    strategy.elixir.module.close()
    return found[0], found[1]


def logs(rank: int, world_size: int, folder: Path, replicas: int) -> dict[str, tuple[Any, Any]]:
    as_launched(rank, world_size)
    options = ON_HOST | {"replicas": replicas}
    return {each.__name__: each(folder, options) for each in (of_trainer, of_accelerate, of_lightning)}


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_log_what_ddp_does(tmp_path: Path, replicas: int) -> None:
    for found in run_ranks(2 * replicas, logs, tmp_path, replicas, wait_s=600.0, group_timeout_s=600.0):
        for framework, (plain, ours) in found.items():
            assert len(plain) == len(ours) > 2, framework
            for one, other in zip(plain, ours, strict=True):
                assert other == pytest.approx(one, rel=0, abs=TOLERANCE), framework
