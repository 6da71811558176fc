"""Saves of processes that are killed at any moment: what was said to be committed can be loaded, and heartbeats end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elixir.checkpoint import Checkpoints, load_checkpoint, save_checkpoint, shared_folder
from elixir.checkpoint.shared_folder import LONGEST_PERIOD_S, HeartbeatGroup
from elixir.checkpoint_format.slice_reader import verify
from elixir.errors import CheckpointError, RankError
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


# --- heartbeats -----------------------------------------------------------------------------------------------------


WORKS = (False, None, None)


class TwoRanks:
    """A group whose other rank gives the same answer in each round."""

    size = 2

    def __init__(self, timeout_s: float | None, theirs: Any = WORKS) -> None:
        self.timeout_s, self.theirs = timeout_s, theirs
        self.rounds: list[Any] = []

    def exchange(self, what: str, mine: Any) -> list[Any]:
        self.rounds.append(mine)
        if isinstance(self.theirs, Exception):
            raise self.theirs
        return [mine, self.theirs]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(shared_folder, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("timeout_s", [None, 1e9, 0.5])
def test_a_heartbeat_joins_a_round_when_one_is_due(timeout_s: float | None, clock: list[float]) -> None:
    group = TwoRanks(timeout_s)
    beats = HeartbeatGroup(group)  # type: ignore[arg-type]
    period_s = LONGEST_PERIOD_S if timeout_s != 0.5 else timeout_s / 2
    for rounds in (1, 2):
        beats.heartbeat()
        assert len(group.rounds) == rounds - 1
        clock[0] += period_s
        beats.heartbeat()
        beats.heartbeat()
        assert group.rounds == [WORKS] * rounds
    group.theirs = (True, None, "the disk is full")
    clock[0] += period_s
    with pytest.raises(CheckpointError, match="rank 1: the disk is full"):
        beats.heartbeat()
    clock[0] += period_s
    beats.heartbeat()
    assert len(group.rounds) == 3


def test_ranks_that_have_lost_each_other_give_a_checkpoint_up(clock: list[float]) -> None:
    group = TwoRanks(None, RankError("rank 1 is gone"))
    beats = HeartbeatGroup(group)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="lost each other: rank 1 is gone"):
        beats.exchange(3)
    own = OSError("no space")
    assert "no space" in str(beats.fail(own))
    assert len(group.rounds) == 1
