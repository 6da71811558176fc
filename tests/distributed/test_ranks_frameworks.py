"""Trainer, Accelerate and Lightning on two ranks under a plan log what they do with DDP, briefly.

One start of ranks for all three, since the imports take most of the time; files, resuming, adapters and other plans are
in the slow tests of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.common.spawn import as_launched, run_ranks

ON_HOST = {"device_memory": "64MiB", "host_memory": "64MiB", "placement": "cpu"}
TOLERANCE = 1e-6


def of_trainer(folder: Path) -> tuple[Any, Any]:
    """Both logs: a ragged accumulation, clipping and a schedule."""
    from elixir.integrations.transformers import ElixirTrainer
    from tests.common.trainers import PLAIN, logged, make

    more = {"samples": 14, "num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
    more["load_best_model_at_end"] = False
    plain = make(PLAIN, folder / "plain", **more)
    plain.train()
    ours = make(ElixirTrainer, folder / "ours", elixir=ON_HOST, **more)
    ours.train()
    ours.elixir.module.close()
    return logged(plain), logged(ours)


def of_accelerate(folder: Path) -> tuple[Any, Any]:
    """Losses and norms of an epoch."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from elixir.integrations.accelerate import ElixirAccelerator
    from tests.common.accelerated import Loop

    found = []
    for kind, more in ((Accelerator, {}), (ElixirAccelerator, {"elixir": ON_HOST})):
        AcceleratorState._reset_state(True)
        loop = Loop(kind(cpu=True, gradient_accumulation_steps=2, **more), samples=12)
        found.append([{"value": value} for value in loop.epoch()])
    loop.accelerator.elixir.module.close()
    return found[0], found[1]


def of_lightning(folder: Path) -> tuple[Any, Any]:
    """Both logs: training, validation, the learning rate."""
    from elixir.integrations.lightning import ElixirStrategy
    from tests.common.lit import fitted

    found = []
    for strategy in ("ddp", ElixirStrategy(**ON_HOST)):
        done, _ = fitted(strategy, folder, devices=2, max_epochs=1, enable_checkpointing=False)
        found.append(done.logger.plain())
    strategy.elixir.module.close()
    return found[0], found[1]


def logs(rank: int, world_size: int, folder: Path) -> dict[str, tuple[Any, Any]]:
    as_launched(rank, world_size)
    return {each.__name__: each(folder) for each in (of_trainer, of_accelerate, of_lightning)}


def test_two_ranks_log_what_ddp_does(tmp_path: Path) -> None:
    for found in run_ranks(2, logs, tmp_path, wait_s=600.0, group_timeout_s=600.0):
        for framework, (plain, ours) in found.items():
            assert len(plain) == len(ours) > 2, framework
            for one, other in zip(plain, ours, strict=True):
                assert other == pytest.approx(one, rel=0, abs=TOLERANCE), framework
