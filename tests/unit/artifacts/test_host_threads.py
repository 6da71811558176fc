"""How many threads the host's Adam has, on which cores, and that nothing else takes them over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elixir.chunk.lanes import ThreadLane
from elixir.errors import InputError
from elixir.hardware.host_share import (
    HostShare,
    HostView,
    adam_threads,
    binds,
    check_host_threads,
    core_list,
    enough_threads,
    host_share,
    quota_cores,
    rank_threads,
    use_threads,
)
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.parity import case, make_plan

counts = st.integers(1, 300)


@given(counts, st.integers(1, 16), st.integers(0, 64))
def test_all_ranks_together_have_no_more_threads_than_cores(cores: int, ranks: int, compute: int) -> None:
    threads = adam_threads(cores, ranks, compute)
    assert threads >= 1
    if cores // ranks > compute + 1:  # else the one thread that Adam always has may be one too many
        assert ranks * (threads + compute) <= cores
    assert (
        adam_threads(cores + 1, ranks, compute) >= threads or cores // ranks == 2
    )  # the third goes to the data loader


def test_the_rule_leaves_cores_for_compute_and_for_the_data_loader() -> None:
    assert [adam_threads(cores) for cores in (1, 2, 3, 4, 7, 8, 9, 16)] == [1, 2, 2, 3, 6, 6, 7, 14]
    assert (adam_threads(16, ranks=8), adam_threads(16, compute_threads=4)) == (2, 10)
    assert (check_host_threads(1), check_host_threads(None)) == (1, None)
    assert enough_threads(lambda threads: 100.0 * min(threads, 5) - threads, most=9) == 5


@given(st.integers(1, 9), st.lists(st.integers(0, 63), min_size=1, max_size=12, unique=True), st.floats(0.5, 99))
def test_ranks_of_a_machine_divide_its_cores_and_quota(ranks: int, cores: list[int], quota: float) -> None:
    views = [HostView(host, tuple(cores), quota, str(rank % 2)) for rank in range(ranks) for host in ("here", "there")]
    shares = [host_share(views, rank, {}) for rank in range(0, 2 * ranks, 2)]
    for rank, share in enumerate(shares):
        assert share.cores
        assert (share.ranks, share.on_machine) == (ranks, ranks)
        assert share.all_cores == max(1, int(min(len(cores), quota)))
        assert share.memory_ranks == tuple(range(rank % 2 * 2, 2 * ranks, 4))
    if len(cores) >= ranks:
        assert [core for share in shares for core in share.cores] == cores


def test_what_a_launcher_has_divided_is_not_divided_again() -> None:
    views = [HostView("here", (0, 1), 8.0), HostView("here", (2, 3), 8.0)]
    environment = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert host_share(views, 1, environment) == HostShare((2, 3), 2, 1)


def test_what_the_system_says_of_cores(tmp_path: Path) -> None:
    member, job = tmp_path / "membership", tmp_path / "cpu" / "job"
    member.write_text("4:cpu,cpuacct:/job\n0::/a/b\n")
    for folder in (job, tmp_path / "a" / "b"):
        folder.mkdir(parents=True)
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (job / "cpu.cfs_quota_us").write_text("-1\n")
    (job / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path, member) == float("inf")
    (tmp_path / "a" / "cpu.max").write_text("450000 100000\n")
    assert quota_cores(tmp_path, member) == 4.5
    (job / "cpu.cfs_quota_us").write_text("300000\n")
    assert quota_cores(tmp_path, member) == 3.0
    assert core_list((3, 2, 0, 5)) == "0,2-3,5"


def test_ranks_outside_of_the_group_share_the_machine_too() -> None:
    view = HostView("here", tuple(range(8)), float("inf"))
    environment = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    assert host_share([view], 0, environment) == HostShare((4, 5), 8, 4)
    assert host_share([view], 0, {"LOCAL_WORLD_SIZE": "many", "LOCAL_RANK": "2"}) == HostShare(view.cores, 8, 1)


def test_the_threads_of_a_rank_are_bound_where_they_fit_its_cores() -> None:
    share = HostShare(cores=(4, 5, 6, 7), all_cores=8, ranks=2)
    assert rank_threads(share, 0, environment={}) == (3, (4, 5, 6, 7) if hasattr(os, "sched_setaffinity") else None)
    assert rank_threads(share, 0, environment={"ELIXIR_BIND": "0"}) == (3, None)
    assert rank_threads(share, 4, environment={"ELIXIR_BIND": "0"}) == (1, None)
    assert rank_threads(share, 0, asked=5, environment={}) == (5, None)


def test_binding_is_for_ranks_that_share_cores_and_can_be_left_off() -> None:
    alone, shared = HostShare((0,), 1, 1), HostShare((0,), 2, 2)
    assert binds(shared, {}) == hasattr(os, "sched_setaffinity")
    assert not binds(alone, {})
    assert not binds(shared, {"ELIXIR_BIND": "0"})
    assert not binds(shared, {"OMP_PROC_BIND": "close"})
    with pytest.raises(InputError, match="ELIXIR_BIND"):
        binds(shared, {"ELIXIR_BIND": "maybe"})


# --- on a lane ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    it = ThreadLane("host adam")
    yield it
    it.close()


def test_a_core_that_is_not_there_is_no_reason_to_stop(lane: ThreadLane, caplog: pytest.LogCaptureFixture) -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("nothing is bound")
    lane.submit(lambda: use_threads(2, [100_000])).wait()
    assert "runs on any core" in caplog.text


def test_threads_of_a_lane_are_its_own(lane: ThreadLane) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    lane.submit(lambda: use_threads(before + 2)).wait()
    lane.submit(lambda: seen.append(torch.get_num_threads())).wait()
    later = ThreadLane("later")
    later.submit(lambda: seen.append(torch.get_num_threads())).wait()
    later.close()
    assert [*seen, torch.get_num_threads()] == [before + 2, before, before]


# --- in the optimizer ------------------------------------------------------------------------------------------------


@pytest.fixture
def module() -> Iterator[ElixirModule]:
    it = case("opt", layers=1)
    made = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu")
    yield made
    made.close()


def _on_lane(module: ElixirModule) -> int:
    seen: list[int] = []
    inside.lane(module, "host_adam").submit(lambda: seen.append(torch.get_num_threads())).wait()
    return seen[0]


def test_by_default_the_rule_says(module: ElixirModule) -> None:
    share = inside.host_share(module)
    expected = adam_threads(share.all_cores, share.ranks, torch.get_num_threads())
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    assert optimizer.host_threads == _on_lane(module) == expected


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_numbers_that_make_no_sense_are_refused(module: ElixirModule, value: Any) -> None:
    with pytest.raises(InputError, match="host_threads"):
        ElixirOptimizer(module, torch.optim.AdamW(module.parameters()), host_threads=value)
