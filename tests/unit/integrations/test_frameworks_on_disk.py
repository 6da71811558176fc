"""The three frameworks under a plan that keeps optimizer states on a disk: the bits of the framework without Elixir."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from elixir.integrations.transformers import ElixirTrainer
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule
from tests.common import trainers
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


def test_a_trainer_trains_and_saves_with_states_on_a_disk(drive: Path) -> None:
    folder = drive.parent
    plain = trainers.train(trainers.PLAIN, folder / "plain", **SHORT)
    planned = trainers.train(ElixirTrainer, folder / "planned", **SHORT, elixir=json.dumps(ON_HOST))
    given = options(planned.trainer.elixir.module.plan, drive)
    ours = trainers.train(ElixirTrainer, folder / "ours", **SHORT, elixir=json.dumps(given))
    assert_same(plain, ours)
    assert same(folder / "plain" / "final", folder / "ours" / "final")
    check(ours.trainer.elixir.module, drive)
