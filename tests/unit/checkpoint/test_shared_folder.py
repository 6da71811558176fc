"""Ranks that save into one folder or into one of each machine: they commit together or not at all. Ranks are threads."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from elixir.checkpoint.heartbeat_group import HeartbeatGroup
from elixir.checkpoint.saving import SaveOptions
from elixir.checkpoint.shared_folder import SharedFolder, newest_of_all
from elixir.checkpoint_format.folder import known_checkpoints, part_folder, read_index
from elixir.checkpoint_format.index import INDEX_NAME, Index
from elixir.checkpoint_format.part_writer import WrittenFile
from elixir.errors import CheckpointError, FileError
from elixir.files import Files
from tests.common import inside
from tests.common.checkpoints import commit_written, save, write
from tests.common.file_faults import FailingFiles, RecordingFiles, UnsyncedFiles, contents

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

    def shared(self, rank: int, index: Index | None = None) -> SharedFolder:
        machine = MACHINES[rank]
        ranks = [other for other in range(RANKS) if MACHINES[other] == machine]
        part = part_folder(self.folders[rank], "0badcafe" if index is None else index.id)
        return SharedFolder(self.folders[rank], part, rank, ranks, 2, self.files[rank])

    def new(self) -> Index:
        """Writes one more checkpoint on both machines, not committed; both have the same files."""
        index = write(self.folders[0], TENSORS, world_size=1, sequence=7)
        parts = [part_folder(folder, index.id) for folder in self.folders[:2]]
        parts[1].mkdir()
        for path in parts[0].iterdir():
            (parts[1] / path.name).write_bytes(path.read_bytes())
        return index

    def names(self, folder: Path) -> set[str]:
        return {path.name for path in folder.iterdir()}


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


@pytest.mark.parametrize("apart", [True, False])
def test_ranks_find_out_who_shares_their_folder(tmp_path: Path, apart: bool) -> None:
    folders = [tmp_path / (machine if apart else "one") / "step" for machine in MACHINES]
    found = together(lambda rank, ranks: SharedFolder.made(folders[rank], "0badcafe", rank, ranks, UnsyncedFiles()))
    expected = [((0, 2), 2), ((1, 3), 2)] * 2 if apart else [((0, 1, 2, 3), 1)] * 4
    assert [(each.ranks, each.count) for each in found] == expected
    assert [each.leads for each in found] == ([True, True, False, False] if apart else [True, False, False, False])
    assert [(each.folder, each.part) for each in found] == [(each, part_folder(each, "0badcafe")) for each in folders]
    assert not any(list(each.part.iterdir()) for each in found), "the marks are gone"
    assert not any(folder.exists() for folder in folders)


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    failing = [FailingFiles(1, only=("create",)) if rank == 1 else UnsyncedFiles() for rank in range(RANKS)]

    def run(rank: int, ranks: HeartbeatGroup) -> None:
        try:
            SharedFolder.made(tmp_path / "step", "0badcafe", rank, ranks, failing[rank])
        except FileError as error:
            raise ranks.fail(error) from error

    assert all("No space left" in str(each) for each in together(run))
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_that_name_stays(tmp_path: Path) -> None:
    (tmp_path / "step").write_text("mine")
    (found,) = together(
        lambda rank, ranks: SharedFolder.made(tmp_path / "step", "0badcafe", 0, ranks, UnsyncedFiles()), 1
    )
    assert isinstance(found, FileError)
    assert "Not a directory" in str(found)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    save(tmp_path / "best", TENSORS)
    (tmp_path / "latest").symlink_to("best")
    (made,) = together(
        lambda rank, ranks: SharedFolder.made(tmp_path / "latest", "0badcafe", 0, ranks, UnsyncedFiles()), 1
    )
    assert made.folder == tmp_path / "best"
    assert made.leads


def test_the_newest_of_all_is_the_first_that_all_have() -> None:
    assert newest_of_all([]) is None
    assert newest_of_all([["b", "a"], ["b"]]) == "b"
    assert newest_of_all([["b", "a"], ["a"], ["c", "a"]]) == "a"
    assert newest_of_all([["b"], []]) is None


def test_a_number_is_above_those_on_all_machines(machines: Machines) -> None:
    save(machines.b.parent / "other", TENSORS, sequence=41)
    assert together(lambda rank, ranks: machines.shared(rank).tidy(ranks)) == [42] * RANKS


@pytest.mark.parametrize("spare", [0, -1])
def test_room_is_needed_for_all_that_share_a_folder(machines: Machines, spare: int) -> None:
    """Ranks 0 and 2 write 100 and 300 bytes to one disk, ranks 1 and 3 200 and 400 to the other."""

    class Full(UnsyncedFiles):
        def free_bytes(self, folder: Any) -> int:
            return 400 if "/a/" in str(folder) else 600 + spare

    machines.files = [Full() for _ in MACHINES]
    found = together(lambda rank, ranks: machines.shared(rank).check_space(100 * (rank + 1), ranks))
    assert [found[rank] for rank in (0, 2, 3)] == [None] * 3
    if spare:
        assert "takes 600 B in" in str(found[1])
        assert "where 599 B are free" in str(found[1])
    else:
        assert found[1] is None


def committed(machines: Machines) -> tuple[list[Any], Index]:
    """A commit of a new checkpoint on both machines."""
    index = machines.new()

    def run(rank: int, ranks: HeartbeatGroup) -> None:
        shared = machines.shared(rank, index)
        try:
            shared.commit(index, ranks)
        except (CheckpointError, FileError) as error:
            shared.abandon()
            raise ranks.fail(error) from error

    return together(run), index


def test_a_commit_is_made_on_all_machines_and_what_it_replaces_goes(machines: Machines) -> None:
    found, index = committed(machines)
    assert found == [None] * RANKS
    for folder in (machines.a, machines.b):
        assert read_index(folder).id == index.id
        assert machines.names(folder) == {INDEX_NAME, *index.files}
        assert machines.names(folder.parent) == {"step"}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("leader", [0, 1])
def test_a_commit_that_fails_on_one_machine_leaves_the_one_before_on_all(
    machines: Machines, leader: int, at: int
) -> None:
    """Whatever the other machine has, both have the one before, and the next save leaves only its own."""
    machines.files = [RecordingFiles() for _ in MACHINES]
    machines.files[leader] = FailingFiles(at, only=("rename",))
    found, index = committed(machines)
    assert [type(each) for each in found] == [CheckpointError] * RANKS
    assert all(str(each).startswith(f"rank {leader}: ") for each in found)
    assert isinstance(found[leader].__cause__, FileError)
    done = [[each.name for each in files.log] for files in machines.files]  # type: ignore[attr-defined]
    assert done[2:] == [[], []], "only the first rank of a machine changes its files"
    known = [[each.id for _, each in known_checkpoints(folder)] for folder in machines.folders[:2]]
    assert known[leader] == [machines.before.id]
    assert known[1 - leader] == [index.id, machines.before.id]
    assert newest_of_all(known) == machines.before.id
    machines.files = [UnsyncedFiles() for _ in MACHINES]
    together(lambda rank, ranks: machines.shared(rank).tidy(ranks))
    for folder in machines.folders[:2]:
        ((_, left),) = known_checkpoints(folder)
        assert left.id == machines.before.id
        assert len(contents(folder.parent)) == 2
    found, index = committed(machines)
    assert found == [None] * RANKS
    assert [[each.id for _, each in known_checkpoints(folder)] for folder in machines.folders[:2]] == [[index.id]] * 2


def test_what_a_cut_off_commit_left_is_ended_alike_on_all_machines(machines: Machines) -> None:
    """One machine had committed when all were killed: the checkpoint before is what both have."""
    commit_written(machines.a, machines.new())
    found = together(lambda rank, ranks: machines.shared(rank).tidy(ranks))
    assert found == [8] * RANKS
    for folder in (machines.folders[0].parent, machines.folders[1].parent):
        ((_, left),) = known_checkpoints(folder / "step")
        assert left.id == machines.before.id
        assert len(contents(folder)) == 2


def test_machines_with_nothing_in_common_keep_what_each_has(machines: Machines) -> None:
    own = save(machines.b, TENSORS, world_size=1)
    together(lambda rank, ranks: machines.shared(rank).tidy(ranks))
    assert [read_index(folder).id for folder in (machines.a, machines.b)] == [machines.before.id, own.id]


def test_a_damaged_index_keeps_its_files_and_gives_way_to_a_whole_one(machines: Machines) -> None:
    (machines.b / INDEX_NAME).write_bytes(b"damaged")
    before = contents(machines.b.parent)
    commit_written(machines.a, machines.new())
    machines.b.joinpath(".0123456789abcdef-rank-00000").touch()
    (machines.a / INDEX_NAME).write_bytes(b"damaged")
    for part in machines.b.parent.glob("*.part"):
        for path in part.iterdir():
            path.unlink()
    together(lambda rank, ranks: machines.shared(rank).tidy(ranks))
    assert [path.suffix for path in machines.folders[0].parent.iterdir()] == [".old"]
    assert contents(machines.b.parent).items() >= before.items()


def test_only_the_first_rank_of_a_machine_removes_what_a_failed_save_wrote(machines: Machines) -> None:
    index = machines.new()
    for rank in (2, 0):
        shared = machines.shared(rank, index)
        shared.abandon()
        assert shared.part.exists() == (rank == 2)
    assert read_index(machines.a).id == machines.before.id
    assert machines.names(machines.a) == {INDEX_NAME, *machines.before.files}


@pytest.mark.parametrize(("keep", "left"), [(None, {1, 2, 3}), (2, {2, 3}), (1, {3})])
def test_the_same_steps_stay_on_all_machines(tmp_path: Path, keep: int | None, left: set[int]) -> None:
    machines = Machines(tmp_path)
    folders = [folder.parent / "step-00000003" for folder in machines.folders]
    for root in {folder.parent for folder in folders}:
        for step in (1, 2, 3):
            save(root / f"step-{step:08}", TENSORS, world_size=1, sequence=step)
        write(root / "step-00000009", TENSORS, world_size=1)
        (root / "step-00000008").mkdir()
        (root / "step-00000008" / "0123456789abcdef-shared.safetensors").touch()  # of an earlier version

    def run(rank: int, ranks: HeartbeatGroup) -> None:
        dataclasses.replace(machines.shared(rank), folder=folders[rank]).retain(keep, ranks)

    assert together(run) == [None] * RANKS
    for root in {folder.parent for folder in folders}:
        assert {path.name for path in root.iterdir()} == {"step", *(f"step-{step:08}" for step in left)}


def test_a_save_leaves_its_own_folder_when_it_removes_others(machines: Machines) -> None:
    index, other = machines.new(), machines.new()
    together(lambda rank, ranks: machines.shared(rank, index).tidy(ranks))
    for folder in (machines.a, machines.b):
        assert part_folder(folder, index.id).exists()
        assert not part_folder(folder, other.id).exists()


def test_replicas_that_wrote_other_bytes_are_refused() -> None:
    """Each of several file systems has the file of a shard, from another replica."""
    same, other = (WrittenFile("0badcafe-shard-00000-of-00001.safetensors", nbytes, {}) for nbytes in (8, 16))
    with pytest.raises(CheckpointError, match="rank 2 has other bytes of 0badcafe-shard.* than a rank before it"):
        inside.index_of("0badcafe", [[same], [same], [other]], SaveOptions(Path("run")))
