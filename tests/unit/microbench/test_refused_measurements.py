"""Measurements that cannot be made, or believed, end with an error that says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from elixir.errors import InputError, RankError
from elixir.microbench import brief, measure_briefly
from elixir.microbench.ranks import Ranks, joined

PAIR = Ranks(2, 0, 2, 0)


def test_a_dtype_that_the_cpu_cannot_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> torch.Tensor:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(F, "linear", lacking)
    monkeypatch.setattr(brief, "WEIGHTS_BYTES", 1)
    with pytest.raises(InputError, match="cannot multiply float16 matrices: not implemented for 'Half'"):
        measure_briefly(0.01, dtype=torch.float16, tokens=1, hidden=8)


def test_ranks_that_do_not_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ValueError("environment variable MASTER_ADDR expected, but not set")

    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", refused)
    with pytest.raises(RankError, match="rank 1 of 2 cannot join the others: .*MASTER_ADDR"), joined():
        pass


def test_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather_object", closed)
    with pytest.raises(RankError, match="another rank is gone while measuring; .*closed by peer"):
        PAIR.exchange(1.0)
