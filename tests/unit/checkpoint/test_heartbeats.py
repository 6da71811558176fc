"""Ranks that write a checkpoint look at each other now and then, and no longer once one has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elixir.checkpoint import heartbeat_group
from elixir.checkpoint.heartbeat_group import LONGEST_PERIOD_S, HeartbeatGroup
from elixir.errors import CheckpointError, RankError

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
    monkeypatch.setattr(heartbeat_group, "time", SimpleNamespace(monotonic=lambda: now[0]))
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
