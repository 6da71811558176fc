"""Saves of processes that are killed at any moment: what was said to be committed can be loaded."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from elixir.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from elixir.checkpoint_format.slice_reader import verify
from tests.common.parity import adamw
from tests.common.resuming import Run
from tests.common.spawn import child, said
from tests.unit.checkpoint.test_folder import planned


def _save_until_killed(say: Any, folder: Path, waits: bool, one: bool) -> None:
    with Run(*planned("cnn", "mixed"), adamw) as run:
        checkpoints = Checkpoints(folder, keep=1)
        for number in range(1, 100_000):
            run.train(1)
            state = run.state(number=number)
            saving = save_checkpoint(folder / "one", state) if one else checkpoints.save(number, state)
            if waits or number == 1:
                saving.wait()
                say.send(number)


def killed(folder: Path, after_s: float, *, waits: bool, one: bool) -> int:
    """The last number that was said to be committed."""
    with child(_save_until_killed, folder, waits, one) as (process, hear):
        first: int = hear.recv()
        time.sleep(after_s)
        assert process.is_alive()
        process.kill()
        process.join()
        return max(first, *said(hear), first)


def kill_and_look(folder: Path, seed: int) -> None:
    waits, one = bool(seed % 2), bool(seed // 2 % 2)
    last = killed(folder, 0.05 + 0.013 * (seed % 23), waits=waits, one=one)
    with Run(*planned("cnn", "mixed"), adamw) as run:
        state = run.state(number=0)
        if one:
            load_checkpoint(folder / "one", state)
        else:
            assert Checkpoints(folder).load(state) is not None
        assert state["number"] >= last
        run.train(1)
        # Whatever lies there, the next save is whole and alone.
        Checkpoints(folder, keep=1, wait=True).save(10**6, run.state(number=1))
        assert [name for name in os.listdir(folder) if name != "one"] == ["step-01000000"]
        assert verify(folder / "step-01000000") == ()


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    kill_and_look(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 102))
def test_killed_a_hundred_times(tmp_path: Path, seed: int) -> None:
    kill_and_look(tmp_path, seed)
