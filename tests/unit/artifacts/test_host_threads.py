"""How many threads the host's Adam has, on which cores, and that nothing else takes them over."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elixir.chunk.lanes import ThreadLane
from elixir.errors import InputError
from elixir.hardware.host_share import (
    HostShare,
    HostView,
    adam_threads,
    binds,
    core_list,
    host_share,
    host_view,
    quota_cores,
    rank_threads,
    use_threads,
)
from elixir.kernels.adam.adam_rule import AdamOptions
from elixir.kernels.adam.eager import fused_step
from elixir.kernels.adam.moments import MasterStates, make_moments
from elixir.kernels.adam.step import Combination, adam_step, build_kernel
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.early import needs_kernel
from tests.common.parity import Case, case, make_plan, square_loss

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can be seen and bound on Linux only")
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
    assert adam_threads(16) == 14
    assert [adam_threads(cores) for cores in (1, 2, 3, 4, 7, 8, 9)] == [1, 2, 2, 3, 6, 6, 7]
    assert adam_threads(16, ranks=8) == 2
    assert adam_threads(16, compute_threads=4) == 10
    assert adam_threads(2, compute_threads=1) == 1
    assert adam_threads(2, ranks=8, compute_threads=2) == 1


@given(st.integers(1, 9), st.lists(st.integers(0, 63), min_size=1, max_size=40, unique=True))
def test_ranks_of_a_machine_have_cores_of_their_own(ranks: int, cores: list[int]) -> None:
    views = [HostView("here", tuple(cores), float("inf")) for _ in range(ranks)]
    shares = [host_share(views, rank, {}) for rank in range(ranks)]
    assert all(share.cores and share.ranks == ranks and share.all_cores == len(cores) for share in shares)
    if len(cores) >= ranks:
        assert [core for share in shares for core in share.cores] == cores


def test_ranks_of_other_machines_have_no_part() -> None:
    views = [HostView(host, (0, 1, 2, 3), float("inf")) for host in ("a", "b", "a", "b")]
    assert host_share(views, 3, {}) == HostShare((2, 3), 4, 2)


def test_what_a_launcher_has_divided_is_not_divided_again() -> None:
    views = [HostView("here", (0, 1), float("inf")), HostView("here", (2, 3), float("inf"))]
    environment = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert host_share(views, 1, environment) == HostShare((2, 3), 2, 1)


def test_ranks_outside_of_the_group_share_the_machine_too() -> None:
    view = HostView("here", tuple(range(8)), float("inf"))
    environment = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    assert host_share([view], 0, environment) == HostShare((4, 5), 8, 4)
    assert host_share([view], 0, {"LOCAL_WORLD_SIZE": "many", "LOCAL_RANK": "2"}) == HostShare(view.cores, 8, 1)


def test_a_quota_is_divided_among_all_ranks_of_the_machine() -> None:
    views = [HostView("here", tuple(range(16)), 6.5) for _ in range(2)]
    share = host_share(views, 0, {})
    assert (share.all_cores, adam_threads(share.all_cores, share.ranks)) == (6, 2)


def test_control_groups_limit_the_cores(tmp_path: Path) -> None:
    member = tmp_path / "membership"
    member.write_text("0::/a/b\n")
    (tmp_path / "v2" / "a" / "b").mkdir(parents=True)
    (tmp_path / "v2" / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert quota_cores(tmp_path / "v2", member) == float("inf")
    (tmp_path / "v2" / "a" / "cpu.max").write_text("250000 100000\n")
    assert quota_cores(tmp_path / "v2", member) == 2.5
    member.write_text("4:cpu,cpuacct:/job\n")
    (tmp_path / "v1" / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "v1" / "cpu" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "v1" / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path / "v1", member) == float("inf")
    (tmp_path / "v1" / "cpu" / "job" / "cpu.cfs_quota_us").write_text("300000\n")
    assert quota_cores(tmp_path / "v1", member) == 3.0


@linux
def test_hyperthreads_of_a_core_are_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for core in range(4):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "thread_siblings_list").write_text(f"{core % 2},{core % 2 + 2}\n")
    assert host_view(topology=tmp_path).cores == (0, 2, 1, 3)


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


def test_cores_are_written_as_linux_does() -> None:
    assert core_list((3, 2, 0)) == "0,2-3"
    assert core_list((5,)) == "5"


# --- on a lane ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    it = ThreadLane("host adam")
    yield it
    it.close()


def _fused() -> Callable[[], object]:
    tensors = [torch.zeros(2**20) for _ in range(4)]
    return partial(fused_step, *tensors, AdamOptions(), 1)


def _in_pieces() -> Callable[[], object]:
    master = torch.zeros(2**20)
    gradient = torch.ones_like(master, dtype=torch.bfloat16)
    moments = make_moments(master.numel(), "float32", "cpu")
    return partial(adam_step, gradient, master, torch.zeros_like(gradient), moments, AdamOptions(), 1, 0.5)


def _compiled() -> Callable[[], object]:
    kernel = build_kernel(Combination(torch.bfloat16, torch.bfloat16, "float32"))
    states = MasterStates(torch.zeros(2**20), make_moments(2**20, "float32", "cpu"))
    gradient = torch.ones_like(states.master, dtype=torch.bfloat16)
    return partial(kernel, gradient, states, states, torch.zeros_like(gradient), AdamOptions(), 1, 1.0, 0)


def _threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


@pytest.mark.sampled
@linux
@pytest.mark.parametrize("make", [_fused, _in_pieces, pytest.param(_compiled, marks=needs_kernel)])
def test_a_lane_steps_on_its_own_threads_and_compute_keeps_its_number(
    lane: ThreadLane, make: Callable[[], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP starts a thread's helpers with its first operator: there are as many new threads as were asked for."""
    monkeypatch.setenv("ELIXIR_COMPILE", "0")  # a thread that compiles would count
    before, core, step = torch.get_num_threads(), min(os.sched_getaffinity(0)), make()
    seen: dict[str, Any] = {}

    def work() -> None:
        use_threads(3, [core])
        started = _threads()
        step()
        helpers = _threads() - started
        seen["count"], seen["helpers"] = torch.get_num_threads(), len(helpers)
        seen["cores"] = [os.sched_getaffinity(helper) for helper in helpers]

    lane.submit(work).wait()
    assert seen == {"count": 3, "helpers": 2, "cores": [{core}] * 2}
    assert torch.get_num_threads() == before
    later: list[int] = []
    user = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    user.start()
    user.join()
    assert later == [before]


@linux
def test_binding_leaves_the_process_alone(lane: ThreadLane) -> None:
    before = os.sched_getaffinity(0)
    lane.submit(lambda: use_threads(1, [min(before)])).wait()
    assert os.sched_getaffinity(0) == before


def test_what_the_user_says_later_does_not_reach_the_lane(lane: ThreadLane) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    lane.submit(lambda: use_threads(3)).wait()
    try:
        torch.set_num_threads(2)
        lane.submit(lambda: seen.append(torch.get_num_threads())).wait()
    finally:
        torch.set_num_threads(before)
    assert seen == [3]


def test_a_core_that_is_not_there_is_no_reason_to_stop(lane: ThreadLane, caplog: pytest.LogCaptureFixture) -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("nothing is bound")
    lane.submit(lambda: use_threads(2, [100_000])).wait()
    assert "runs on any core" in caplog.text


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


def test_the_optimizer_sets_the_threads_of_its_lane(module: ElixirModule, caplog: pytest.LogCaptureFixture) -> None:
    parameters = list(module.parameters())
    first, second = torch.optim.AdamW(parameters[:2]), torch.optim.AdamW(parameters[2:])
    with caplog.at_level(logging.INFO, "elixir"):
        optimizer = ElixirOptimizer(module, first, host_threads=1)
    assert optimizer.host_threads == _on_lane(module) == 1
    assert "threads of the host's Adam: 1, not bound" in caplog.text
    cores, lane = os.sched_getaffinity(0), inside.lane(module, "host_adam")
    lane.submit(lambda: os.sched_setaffinity(0, {min(cores)})).synchronize()  # as an optimizer under another setting
    assert ElixirOptimizer(module, second, host_threads=5).host_threads == _on_lane(module) == 5
    bound: list[set[int]] = []
    lane.submit(lambda: bound.append(os.sched_getaffinity(0))).synchronize()
    assert bound == [cores]


def test_threads_that_step_nothing_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    it = Case(nn.Linear(8, 8), {"input": torch.randn(2, 8)}, square_loss)
    module = ElixirModule(it.model, make_plan(it, "resident"), device="cpu")
    with caplog.at_level(logging.INFO, "elixir"):
        ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    assert "threads of the host's Adam" not in caplog.text


def test_by_default_the_rule_says(module: ElixirModule) -> None:
    share = inside.host_share(module)
    expected = adam_threads(share.all_cores, share.ranks, torch.get_num_threads())
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    assert optimizer.host_threads == _on_lane(module) == expected


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_numbers_that_make_no_sense_are_refused(module: ElixirModule, value: Any) -> None:
    with pytest.raises(InputError, match="host_threads"):
        ElixirOptimizer(module, torch.optim.AdamW(module.parameters()), host_threads=value)
