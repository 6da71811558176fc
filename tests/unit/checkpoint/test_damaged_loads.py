"""A damaged checkpoint is loaded right or not at all; what a whole save does may be cut off anywhere."""

from __future__ import annotations

import collections
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.errors import CheckpointError
from tests.common.file_faults import Crash, RecordingFiles, UnsyncedFiles
from tests.common.parity import adamw, case, make_plan
from tests.common.resuming import Run, differing, values_left
from tests.unit.checkpoint.test_checkpoint_format_damage import damage

FILES = UnsyncedFiles()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    it = case("cnn")
    with Run(it, make_plan(it, "mixed"), adamw) as made:
        made.train(1)
        yield made


def outcomes_of(run: Run, place: Path, seeds: range) -> collections.Counter[str]:
    whole, bomb = place / "whole", place / "executed"
    save_checkpoint(whole, run.state(number=7, table=torch.arange(5)), wait=True, files=FILES)
    expected, outcomes = run.bits(), collections.Counter[str]()
    for seed in seeds:
        folder = place / "damaged"
        shutil.copytree(whole, folder)
        what = damage(folder, random.Random(seed), bomb)
        state = run.state(number=0, table=torch.zeros(5, dtype=torch.int64))
        try:
            load_checkpoint(folder, state, files=FILES)
            assert differing(expected, run.bits()) == [], f"wrong data after {what}, seed {seed}"
            assert state["number"] == 7
            assert state["table"].tolist() == [0, 1, 2, 3, 4]
            outcomes["right"] += 1
            with run.module.gathered(write=True), torch.no_grad():  # the next load has something to do
                for parameter in run.module.module.parameters():
                    parameter.zero_()
        except CheckpointError as error:
            outcomes[type(error).__name__] += 1
            assert state["number"] == 0, f"half loaded after {what}, seed {seed}"
        shutil.rmtree(folder)
    assert not bomb.exists()
    load_checkpoint(whole, run.state(), files=FILES)
    assert differing(expected, run.bits()) == []
    return outcomes


def test_damage_is_an_error_of_one_family_or_does_not_matter(run: Run, tmp_path: Path) -> None:
    outcomes = outcomes_of(run, tmp_path, range(40))
    assert outcomes["CheckpointCorrupt"] > 20
    assert outcomes["right"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("portion", range(20))
def test_damage_ten_thousand_times(run: Run, tmp_path: Path, portion: int) -> None:
    outcomes = outcomes_of(run, tmp_path, range(500 * portion, 500 * (portion + 1)))
    assert outcomes["CheckpointCorrupt"] > 250


def test_every_prefix_of_a_whole_save_leaves_the_old_or_the_new(run: Run, tmp_path: Path) -> None:
    """Also with all or a part of what was not synchronised dropped: bytes, names and renames."""
    folder = tmp_path / "run"
    save_checkpoint(folder, run.state(number=1), wait=True, files=FILES)
    crash, recorded = Crash(folder), RecordingFiles()
    save_checkpoint(folder, run.state(number=2), wait=True, files=recorded)
    assert values_left(crash, recorded.log, tmp_path, seeds=2) == {1, 2}
