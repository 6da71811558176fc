"""Ranks that save into one folder or into one of each machine: they commit together or not at all. Ranks are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from elixir.checkpoint.saving import SaveOptions
from elixir.checkpoint.shared_folder import HeartbeatGroup, SharedFolder, newest_of_all
from elixir.checkpoint_format.folders import read_index
from elixir.checkpoint_format.index import INDEX_NAME, PREVIOUS_NAME, Index
from elixir.checkpoint_format.slices import WrittenFile
from elixir.errors import CheckpointError, FileError
from elixir.files import Files
from tests.common import inside
from tests.common.checkpoints import save, write
from tests.common.file_faults import FailingFiles, RecordingFiles, UnsyncedFiles

T = TypeVar("T")
RANKS = 4
MACHINES = ["a", "b", "a", "b"]
"""The machine of each rank, where machines have separate disks."""
TENSORS = {"weight/w": torch.arange(3.0)}


class Threads:
    """A group of ranks that are threads."""

    timeout_s = 20.0

    def __init__(self, rank: int, size: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier = rank, size, values, barrier

    def exchange(self, what: str, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(self.timeout_s)
        found = list(self._values)
        self._barrier.wait(self.timeout_s)
        return found


def together(work: Callable[[int, HeartbeatGroup], T], size: int = RANKS) -> list[T]:
    """The result or error of each rank."""
    values, barrier, found = [None] * size, threading.Barrier(size), list[Any]([None] * size)

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, HeartbeatGroup(Threads(rank, size, values, barrier)))  # type: ignore[arg-type]
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


class Machines:
    """Two machines with a folder each, in which the four ranks share the first checkpoint."""

    def __init__(self, root: Path) -> None:
        self.folders = [root / machine / "step" for machine in MACHINES]
        self.files: list[Files] = [UnsyncedFiles() for _ in MACHINES]
        self.before = save(self.a, TENSORS, world_size=1)
        for path in self.a.iterdir():
            (self.b / path.name).write_bytes(path.read_bytes())

    @property
    def a(self) -> Path:
        self.folders[0].mkdir(parents=True, exist_ok=True)
        return self.folders[0]

    @property
    def b(self) -> Path:
        self.folders[1].mkdir(parents=True, exist_ok=True)
        return self.folders[1]

    def shared(self, rank: int, group: Any = None) -> SharedFolder:
        machine = MACHINES[rank]
        ranks = [other for other in range(RANKS) if MACHINES[other] == machine]
        return SharedFolder(self.folders[rank], rank, ranks, group, 2, self.files[rank])

    def new(self, folder: Path, like: Index | None = None) -> Index:
        """Writes one more checkpoint into a folder, not committed."""
        index = write(folder, TENSORS, world_size=1, sequence=7)
        if like is None:
            return index
        for name in index.files:  # both machines have the same files
            (folder / name).rename(folder / name.replace(index.id, like.id))
        return like

    def names(self, folder: Path) -> set[str]:
        return {path.name for path in folder.iterdir()}


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def test_one_rank_is_alone_and_makes_its_folder(tmp_path: Path) -> None:
    files = RecordingFiles()
    (alone,) = together(lambda rank, ranks: SharedFolder.found(tmp_path / "x", "0badcafe", rank, ranks, files), size=1)
    assert (list(alone.ranks), alone.count, alone.leads) == ([0], 1, True)
    assert not any(each.name == "create" for each in files.log)
    assert (tmp_path / "x").is_dir()


def test_the_newest_of_all_is_the_first_that_all_have() -> None:
    assert newest_of_all([]) is None
    assert newest_of_all([["b", "a"], ["b"]]) == "b"
    assert newest_of_all([["b", "a"], ["a"], ["c", "a"]]) == "a"
    assert newest_of_all([["b"], []]) is None


@pytest.mark.parametrize("spare", [0, -1])
def test_room_is_needed_for_all_that_share_a_folder(machines: Machines, spare: int) -> None:
    """Ranks 0 and 2 write 100 and 300 bytes to one disk, ranks 1 and 3 200 and 400 to the other."""

    class Full(UnsyncedFiles):
        def free_bytes(self, folder: Any) -> int:
            return 400 if "/a/" in str(folder) else 600 + spare

    machines.files = [Full() for _ in MACHINES]
    found = together(lambda rank, ranks: machines.shared(rank, ranks).check_space(100 * (rank + 1)))
    assert [found[rank] for rank in (0, 2, 3)] == [None] * 3
    if spare:
        assert "takes 600 B in" in str(found[1])
        assert "where 599 B are free" in str(found[1])
    else:
        assert found[1] is None


def committed(machines: Machines) -> tuple[list[Any], Index]:
    """A commit of a new checkpoint on both machines."""
    index = machines.new(machines.a)
    machines.new(machines.b, like=index)

    def run(rank: int, ranks: HeartbeatGroup) -> None:
        machines.shared(rank, ranks).commit(index, machines.before.id)

    return together(run), index


def test_a_commit_is_made_on_all_machines_and_what_it_replaces_goes(machines: Machines) -> None:
    found, index = committed(machines)
    assert found == [None] * RANKS
    for folder in (machines.a, machines.b):
        assert read_index(folder).id == index.id
        assert machines.names(folder) == {INDEX_NAME, *index.files}


@pytest.mark.parametrize("leader", [0, 1])
def test_a_commit_that_fails_on_one_machine_is_taken_back_on_the_other(machines: Machines, leader: int) -> None:
    machines.files = [RecordingFiles() for _ in MACHINES]
    machines.files[leader] = FailingFiles(1, only=("rename",))
    found, _ = committed(machines)
    assert [type(each) for each in found] == [CheckpointError] * RANKS
    assert all(str(each).startswith(f"rank {leader}: ") for each in found)
    assert isinstance(found[leader].__cause__, FileError)
    assert found[1 - leader].__cause__ is None
    done = [[each.name for each in files.log] for files in machines.files]  # type: ignore[attr-defined]
    assert done[2:] == [[], []], "only the first rank of a machine changes its files"
    assert done[leader][-3:] == ["remove", "rename", "remove"], done
    other, failed = (machines.b, machines.a) if leader == 0 else (machines.a, machines.b)
    assert machines.names(other) == {INDEX_NAME, *machines.before.files}, "its new files are gone, too"
    assert machines.names(failed) >= {INDEX_NAME, *machines.before.files}
    for folder in (machines.a, machines.b):
        assert read_index(folder).id == machines.before.id
        assert PREVIOUS_NAME not in machines.names(folder)


def test_a_first_commit_that_fails_elsewhere_leaves_no_checkpoint(tmp_path: Path) -> None:
    """The folder is synchronised after the index has gone, before the files that it names go."""
    machines = Machines(tmp_path)
    for folder in (machines.a, machines.b):
        for path in folder.iterdir():
            path.unlink()
    index = machines.new(machines.a)
    machines.new(machines.b, like=index)
    machines.files = [RecordingFiles(), FailingFiles(1, only=("rename",)), UnsyncedFiles(), UnsyncedFiles()]
    found = together(lambda rank, ranks: machines.shared(rank, ranks).commit(index, None))
    assert [type(each) for each in found] == [CheckpointError] * RANKS
    assert machines.names(machines.a) == set()
    log = machines.files[0].log  # type: ignore[attr-defined]
    done = [(each.name, os.path.basename(each.path)) for each in log]
    assert done[-4:] == [
        ("remove", INDEX_NAME),
        ("sync_folder", "step"),
        ("sync_folder", "step"),
        ("remove", next(iter(index.files))),
    ]


def test_machines_with_nothing_in_common_keep_what_each_has(machines: Machines) -> None:
    own = save(machines.b, TENSORS, world_size=1)
    found = together(lambda rank, ranks: machines.shared(rank, ranks).clean_up())
    assert found == [None] * RANKS
    assert [read_index(folder).id for folder in (machines.a, machines.b)] == [machines.before.id, own.id]


def test_a_damaged_index_keeps_its_files_and_an_old_previous_one_goes(machines: Machines) -> None:
    (machines.a / PREVIOUS_NAME).write_bytes(b"damaged")
    (machines.b / INDEX_NAME).write_bytes(b"damaged")
    (machines.b / PREVIOUS_NAME).write_bytes(b"damaged")
    assert together(lambda rank, ranks: machines.shared(rank, ranks).clean_up()) == [None] * RANKS
    assert machines.names(machines.a) == {INDEX_NAME, *machines.before.files}
    assert machines.names(machines.b) == {INDEX_NAME, *machines.before.files}


def test_only_the_first_rank_of_a_machine_removes_what_a_failed_save_wrote(machines: Machines) -> None:
    index = machines.new(machines.a)
    for rank in (2, 0):
        machines.shared(rank).abandon(index.id)
        assert (next(iter(index.files)) in machines.names(machines.a)) == (rank == 2)
    machines.shared(0).abandon(machines.before.id)
    assert read_index(machines.a).id == machines.before.id
    assert machines.names(machines.a) == {INDEX_NAME, *machines.before.files}


def test_a_written_file_that_is_gone_is_noticed_before_the_commit(machines: Machines) -> None:
    there, gone = (WrittenFile(name, 8, {}) for name in (INDEX_NAME, "gone"))
    machines.shared(0).check_written([there])
    with pytest.raises(CheckpointError, match="gone is gone: another save"):
        machines.shared(0).check_written([there, gone])


def test_replicas_that_wrote_other_bytes_are_refused() -> None:
    """Each of several file systems has the file of a shard, from another replica."""
    same, other = (WrittenFile("0badcafe-shard-00000-of-00001.safetensors", nbytes, {}) for nbytes in (8, 16))
    with pytest.raises(CheckpointError, match="rank 2 has other bytes of 0badcafe-shard.* than a rank before it"):
        inside.index_of("0badcafe", [[same], [same], [other]], SaveOptions(Path("run")))
