"""Checkpoints of replicas: each shard is written once for all that share a folder, and any ranks load the same bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.errors import CheckpointError
from tests.common import inside
from tests.common.file_faults import UnsyncedFiles
from tests.common.resuming import Run
from tests.common.spawn import run_ranks
from tests.distributed.test_ranks_reshard import compare, made

FILES = UnsyncedFiles()


def _folder(folder: str, rank: int, machines: int) -> Path:
    """The folder as a rank sees it: one for all, or under one name one of each machine of two ranks."""
    here = Path(folder, "all" if machines == 1 else f"machine-{rank // 2}")
    here.mkdir(exist_ok=True)
    os.chdir(here)
    return Path("saved")


def _save(rank: int, world_size: int, folder: str, home: str, machines: int) -> None:
    with made(rank, world_size, home, {"replicas": 2}) as run:
        run.train(2)
        place = _folder(folder, rank, machines)
        save_checkpoint(place, run.state(), wait=True, files=FILES)
        if machines == 1:
            compare(run, place)
        names = sorted(path.name.partition("-")[2].partition(".")[0] for path in place.glob("*.safetensors"))
        here = range(world_size) if machines == 1 else range(rank // 2 * 2, rank // 2 * 2 + 2)
        shards = [f"shard-{shard:05}-of-00002" for shard in range(2)]
        assert names == [*(f"rank-{each:05}-of-00004" for each in here), *shards]


def _load(rank: int, world_size: int, folder: str, replicas: int, machines: int) -> None:
    with made(rank, world_size, "host", {"replicas": replicas}, split_number=3) as run:
        run.train(1)  # states that are to be replaced
        place = _folder(folder, rank, machines)
        load_checkpoint(place, run.state(), files=FILES)
        if machines == 1:
            compare(run, place)
        save_checkpoint(Path(folder, "again"), run.state(), wait=True, files=FILES)
        run.train(1)
    with made(rank, world_size, "resident", {}, split_number=3) as other:  # what was saved, from a folder that all see
        load_checkpoint(Path(folder, "again"), other.state(), files=FILES)
        compare(other, Path(folder, "again"))


@pytest.mark.parametrize(
    ("home", "others"),
    [("mixed", ((4, 1), (1, 1))), pytest.param("device", ((4, 2), (4, 1), (1, 1)), marks=pytest.mark.slow)],
)
def test_two_replicas_save_and_any_ranks_load(tmp_path: Path, home: str, others: tuple[tuple[int, int], ...]) -> None:
    run_ranks(4, _save, str(tmp_path), home, 1)
    for ranks, replicas in others:
        run_ranks(ranks, _load, str(tmp_path), replicas, 1)


@pytest.mark.slow
def test_machines_with_disks_of_their_own_each_have_all_shards(tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path), "host", 2)
    run_ranks(4, _load, str(tmp_path), 2, 2)


def _goes_on(rank: int, world_size: int, folder: str, until: int) -> list[float]:
    with made(rank, world_size, "host", {"replicas": 2}) as run:
        if Path(folder, "run").exists():
            load_checkpoint(Path(folder, "run"), run.state(), files=FILES)
        losses = run.train(until)
        save_checkpoint(Path(folder, "run"), run.state(), wait=True, files=FILES)
        return losses


@pytest.mark.slow
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run_ranks(4, _goes_on, str(whole), 4)
    first, second = (run_ranks(4, _goes_on, str(parts), 2) for _ in range(2))
    assert [a + b for a, b in zip(first, second, strict=True)] == expected


def _parted(rank: int, world_size: int, folder: str) -> None:
    run: Run
    with made(rank, world_size, "host", {"replicas": 2}) as run:
        run.train(1)
        if rank == 2:
            run.module.settle()
            inside.chunks(run.module)[0].shard_weights[0] += 1.0
        with pytest.raises(CheckpointError, match="the replicas no longer have the same weights and states"):
            save_checkpoint(_folder(folder, rank, 2), run.state(), wait=True, files=FILES)


@pytest.mark.slow
def test_replicas_that_differ_are_noticed_where_each_writes(tmp_path: Path) -> None:
    run_ranks(4, _parted, str(tmp_path))
