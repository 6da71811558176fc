"""The three frameworks under a plan that keeps optimizer states on a disk: the bits of the framework without Elixir."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from elixir.integrations.accelerate import ElixirAccelerator
from elixir.integrations.lightning import ElixirStrategy
from elixir.integrations.transformers import ElixirTrainer
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule
from tests.common import accelerated, lit, trainers
from tests.common.on_disk import on_disk
from tests.unit.integrations.test_trainer import SHORT, assert_same, same

ON_HOST = {"device_memory": "64MiB", "host_budget": "64MiB", "placement": "cpu"}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """All Accelerators of a process share a state, which the first one makes."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    folder = tmp_path / "drive"
    folder.mkdir()
    return folder


def options(plan: Plan, drive: Path) -> dict[str, Any]:
    """Options of a run under `plan`, with its states on the disk of a folder."""
    return {"plan": str(on_disk(plan).save(drive.parent / "disk.json")), "disk_folder": str(drive)}


def check(module: ElixirModule, drive: Path) -> None:
    """The states were on the disk, in as many bytes as the plan says, and leave nothing there."""
    report = module.last_report
    assert report is not None
    for name in ("disk_read", "disk_write", "disk_peak"):
        assert report.observed[name] == report.predicted[name] > 0
    assert report.busy_s["disk"] > 0
    assert list(drive.iterdir()) == []
    module.close()


def test_an_accelerator_saves_and_goes_on_with_states_on_a_disk(drive: Path) -> None:
    plain = accelerated.Loop(Accelerator(cpu=True, gradient_accumulation_steps=2))
    losses = plain.epoch() + plain.epoch()
    planned = ElixirAccelerator(cpu=True, gradient_accumulation_steps=2, elixir=ON_HOST)
    accelerated.Loop(planned)
    given = options(planned.elixir.module.plan, drive)
    ours = accelerated.Loop(ElixirAccelerator(cpu=True, gradient_accumulation_steps=2, elixir=given))
    first = ours.epoch()
    ours.accelerator.save_state(str(drive.parent / "saved"))
    second = ours.epoch()
    assert first + second == losses
    ours.accelerator.load_state(str(drive.parent / "saved"))
    assert ours.epoch() == second
    assert accelerated.same(plain.weights(), ours.weights())
    check(ours.accelerator.elixir.module, drive)


def test_lightning_trains_and_saves_with_states_on_a_disk(drive: Path) -> None:
    folder = drive.parent
    plain, _ = lit.fitted("ddp", folder / "plain")
    of_host = ElixirStrategy(device_memory="64MiB", host_budget="64MiB", placement_policy="cpu")
    planned = of_host.dry_run(lit.trainer(of_host, folder / "planned"), lit.Module(), train_dataloaders=lit.data())
    strategy = ElixirStrategy(**options(planned, drive))
    ours, _ = lit.fitted(strategy, folder / "ours")
    assert ours.logger.plain() == plain.logger.plain()
    for run, name in ((plain, "plain.ckpt"), (ours, "ours.ckpt")):
        run.save_checkpoint(folder / name)
    assert lit.same(lit.states(folder / "plain.ckpt"), lit.states(folder / "ours.ckpt"))
    check(strategy.elixir.module, drive)


def test_a_trainer_trains_and_saves_with_states_on_a_disk(drive: Path) -> None:
    folder = drive.parent
    plain = trainers.train(trainers.PLAIN, folder / "plain", **SHORT)
    planned = trainers.train(ElixirTrainer, folder / "planned", **SHORT, elixir=json.dumps(ON_HOST))
    given = options(planned.trainer.elixir.module.plan, drive)
    ours = trainers.train(ElixirTrainer, folder / "ours", **SHORT, elixir=json.dumps(given))
    assert_same(plain, ours)
    assert same(folder / "plain" / "final", folder / "ours" / "final")
    check(ours.trainer.elixir.module, drive)
