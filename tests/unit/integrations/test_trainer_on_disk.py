"""transformers.Trainer under a plan that keeps optimizer states on a disk, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elixir.integrations.transformers import ElixirTrainer
from tests.common.trainers import PLAIN, train
from tests.unit.integrations.test_trainer import SHORT, assert_same, same


@pytest.mark.slow
def test_trains_with_states_on_a_disk(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    options = {
        "device_memory": "90KiB",
        "host_memory": "100KiB",
        "disk_memory": "1GiB",
        "disk_folder": str(drive),
        "replan": False,
    }
    plain = train(PLAIN, tmp_path / "plain", **SHORT)
    ours = train(ElixirTrainer, tmp_path / "ours", **SHORT, elixir=json.dumps(options))
    module = ours.trainer.elixir.module
    assert module.plan.uses_disk
    assert_same(plain, ours)
    assert same(tmp_path / "plain" / "final", tmp_path / "ours" / "final")
    report = module.last_report
    assert report is not None
    for name in ("disk_read", "disk_write", "disk_peak"):
        assert report.observed[name] == report.predicted[name] > 0
    assert list(drive.iterdir()) == []
    module.close()
