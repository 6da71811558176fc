"""Several ranks save, and are killed or crash at any moment: there is the checkpoint before or the new one, whole."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elixir.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from elixir.checkpoint_format.slice_reader import verify
from elixir.errors import CheckpointError, RankError
from tests.common.ddp import batch_of, plan_for
from tests.common.file_faults import CHANGES, Crash, Operation, RecordingFiles, UnsyncedFiles
from tests.common.parity import Case, hf_loss
from tests.common.resuming import Run, two_groups, values_left
from tests.common.spawn import run_ranks, run_to_end
from tests.common.tiny_models import tiny

FILES = UnsyncedFiles()


def made(rank: int, world_size: int) -> Run:
    model = tiny("opt", layers=1)
    inp = batch_of(model, rank, world_size)
    return Run(Case(model, inp, hf_loss), plan_for(model, inp, "host"), two_groups())


# --- kill -9 -------------------------------------------------------------------------------------------------------


class Killed(UnsyncedFiles):
    """This process is killed with its `at`-th change."""

    def __init__(self, at: int) -> None:
        self._left = at

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation in CHANGES:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().call(operation, path, function, *args)


def _save_until_killed(rank: int, world_size: int, folder: str, seed: int) -> None:
    dice = random.Random(seed)
    victims = dice.choice([(0,), (1,), (0, 1)])
    waits, one = dice.random() < 0.5, dice.random() < 0.5
    at = [dice.randint(1, 300) for _ in range(world_size)][rank]
    run = made(rank, world_size)
    files = Killed(at) if rank in victims else FILES
    checkpoints = Checkpoints(folder, keep=1, files=files)
    for number in range(1, 50):
        run.train(1)
        state = run.state(number=number)
        try:
            saving = save_checkpoint(f"{folder}/one", state, files=files) if one else checkpoints.save(number, state)
            if waits:
                saving.wait()
        except (CheckpointError, RankError):
            return  # the other one is gone
        if rank == 0 and waits:
            Path(f"{folder}-said").write_text(str(number))


def _look(rank: int, world_size: int, folder: str, said: int) -> int:
    with made(rank, world_size) as run:
        state = run.state(number=0)
        if os.path.exists(f"{folder}/one/index.json"):
            load_checkpoint(f"{folder}/one", state, files=FILES)
        else:
            Checkpoints(folder, files=FILES).load(state)
        assert state["number"] >= said
        run.train(1)
        # Whatever lies there, the next save is whole and alone.
        with Checkpoints(folder, keep=1, files=FILES) as checkpoints:
            checkpoints.save(10**6, run.state(number=1))
        return int(state["number"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "runs"
    outcomes = run_to_end(2, _save_until_killed, str(folder), seed, group_timeout_s=20.0)
    assert any(outcome.error == "the process ended without an answer" for outcome in outcomes)
    path = Path(f"{folder}-said")
    run_ranks(2, _look, str(folder), int(path.read_text()) if path.exists() else 0)
    assert [name for name in os.listdir(folder) if name != "one"] == ["step-01000000"]
    assert verify(folder / "step-01000000") == ()
    assert len(os.listdir(folder / "step-01000000")) == 3  # the index and two ranks: nothing of the one that was killed


# --- crashes of the machine ----------------------------------------------------------------------------------------


class TimedFiles(RecordingFiles):
    """Says of every change when it was over, so that those of several ranks have an order."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[int] = []

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        result = super().call(operation, path, function, *args)
        self.times += [time.monotonic_ns()] * (len(self.log) - len(self.times))
        return result


def _record(rank: int, world_size: int, folder: str) -> list[tuple[int, Operation]]:
    files = TimedFiles()
    with made(rank, world_size) as run:
        run.train(1)
        save_checkpoint(folder, run.state(number=2), wait=True, files=files)
    return list(zip(files.times, files.log, strict=True))


def _first(rank: int, world_size: int, folder: str) -> None:
    with made(rank, world_size) as run:
        save_checkpoint(folder, run.state(number=1), wait=True, files=FILES)


def test_every_prefix_of_what_two_ranks_do_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Also with all or a part of what was not synchronised dropped: bytes, names and renames."""
    folder = tmp_path / "run"
    run_ranks(2, _first, str(folder))
    crash = Crash(folder)
    logs = run_ranks(2, _record, str(folder))
    log = [operation for _, operation in sorted((each for log in logs for each in log), key=lambda each: each[0])]
    assert {"create", "resize", "write", "sync", "link", "rename", "remove", "sync_folder"} <= {o.name for o in log}
    assert values_left(crash, log, tmp_path, seeds=3) == {1, 2}
