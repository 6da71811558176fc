"""Whatever is killed or fails when, a folder holds the checkpoint before or the new one, each whole."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from elixir.checkpoint_format.folder import (
    known_checkpoints,
    located,
    newest_checkpoints,
    old_folder,
    part_folder,
    remove_checkpoint,
    remove_old,
    tidy,
)
from elixir.checkpoint_format.index import Index
from elixir.checkpoint_format.saved_checkpoint import open_checkpoint, verify
from elixir.checkpoint_format.saved_tensor import SPAN_BYTES
from elixir.errors import CheckpointError, CheckpointNotFound, FileError
from elixir.files import Files
from tests.common.checkpoints import commit_written, found_in, save, write
from tests.common.file_faults import (
    Crash,
    FailingFiles,
    RecordingFiles,
    ShortFiles,
    UnsyncedFiles,
    contents,
    lay_out,
)


def states(generation: int) -> dict[str, torch.Tensor]:
    """Tensors that all say which save they are of."""
    return {
        f"{kind}/{name}": torch.full((50 + generation, 3), float(generation))
        for kind in ("weight", "m")
        for name in "ab"
    }


def save_generation(folder: Path, generation: int, files: Files | None = None) -> Index:
    files = files or UnsyncedFiles()
    return save(folder, states(generation), values={"generation": generation}, step=generation, files=files)


def generation_in(folder: Path) -> int:
    """The save that the folder holds; fails unless all of it is of that one."""
    assert verify(folder) == ()
    with open_checkpoint(folder) as saved:
        generation = saved.value("generation")
        for key, expected in states(generation).items():
            assert torch.equal(saved.read_whole(key), expected)
        assert saved.step == generation
        return int(generation)


def generation_or_0(folder: Path) -> int:
    """The same, 0 without a checkpoint."""
    try:
        return generation_in(folder)
    except CheckpointNotFound:
        return 0


@pytest.mark.parametrize("before", ["nothing", "checkpoint", "not removed", "killed", "between renames"])
def test_every_prefix_of_a_save_leaves_the_old_or_the_new(tmp_path: Path, before: str) -> None:
    """Also with all or a part of what was not synchronised dropped: bytes, names and renames."""
    root = tmp_path / "disk"
    folder = root / "run"
    root.mkdir()
    if before != "nothing":
        save_generation(folder, 1)
    if before == "not removed":
        commit_written(folder, write(folder, states(2), values={"generation": 2}, step=2))
    if before == "killed":
        write(folder, states(9))
    if before == "between renames":
        folder.rename(old_folder(folder, "0badcafe"))
        write(folder, states(9))
    if before != "nothing":
        (located(folder) / "notes").write_bytes(b"mine")
    old = 0 if before == "nothing" else generation_in(folder)
    new = old + 1
    crash, recorded = Crash(root), RecordingFiles()
    save_generation(folder, new, files=recorded)
    assert {each.name for each in recorded.log} >= {"create", "resize", "write", "sync", "rename", "sync_folder"}
    found: dict[frozenset[tuple[str, bytes]], int] = {}  # many prefixes leave the same
    committed_at = len(recorded.log)
    for number in range(len(recorded.log) + 1):
        if number:
            crash.do(recorded.log[number - 1])
        for what, content in crash.outcomes(seeds=4):
            left = frozenset(content.items())
            if left not in found:
                place = lay_out(tmp_path / f"left-{len(found)}", content) / "run"
                found[left] = generation_or_0(place)
                if len(found) % 5 == 0:
                    # The next run finds its way, and leaves nothing behind.
                    save_generation(place, new + 1)
                    assert generation_in(place) == new + 1
                    mine = [path.name for path in place.iterdir() if path.name == "notes"]
                    assert mine or old == 0 or what != "kept"
                    assert len(list(place.iterdir())) == 3 + len(mine)
                    assert list(place.parent.iterdir()) == [place]
            assert found[left] in (old, new), (number, what)
            if what == "kept" and found[left] == new:
                committed_at = min(committed_at, number)
            assert found[left] == new or number < len(recorded.log), "what was said to be committed is not there"
    assert set(found.values()) == {old, new}
    assert committed_at < len(recorded.log)


def test_a_save_that_does_not_synchronise_would_be_caught(tmp_path: Path) -> None:
    """The replay above can fail: without synchronised files, or folders, there are states that are neither."""
    for left_out in ("sync", "sync_folder"):
        root = tmp_path / left_out
        root.mkdir()
        save_generation(root / "run", 1)
        crash, recorded = Crash(root), RecordingFiles()
        save_generation(root / "run", 2, files=recorded)
        wrong = 0
        for operation in recorded.log:
            if operation.name == left_out:
                continue
            crash.do(operation)
            for _, content in crash.outcomes(seeds=2):
                place = lay_out(tmp_path / f"left-{len(list(tmp_path.iterdir()))}", content)
                try:
                    wrong += generation_in(place / "run") not in (1, 2)
                except (CheckpointError, AssertionError):
                    wrong += 1
            if wrong:
                break
        assert wrong


def test_every_prefix_of_a_removal_leaves_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    save_generation(root / "run", 1)
    crash, recorded = Crash(root), RecordingFiles()
    remove_checkpoint(root / "run", files=recorded)
    assert not (root / "run").exists()
    for number, operation in enumerate(recorded.log):
        crash.do(operation)
        for what, content in crash.outcomes(seeds=2):
            place = lay_out(tmp_path / f"{number}-{what.replace(' ', '-')}", content)
            assert generation_or_0(place / "run") in (0, 1)


# --- several file systems --------------------------------------------------------------------------------------------


def test_file_systems_that_commit_at_different_moments_keep_what_all_have(tmp_path: Path) -> None:
    """One file system has committed, the other has not when both are killed: both go on with the one before."""
    places = [tmp_path / name / "run" for name in "ab"]
    old = [save_generation(place, 1) for place in places]
    new = [write(place, states(2), values={"generation": 2}, step=2) for place in places]
    commit_written(places[0], new[0])
    assert [index for _, index in known_checkpoints(places[0])] == [new[0], old[0]]
    # ... and killed.
    for place, index in zip(places, old, strict=True):
        for _ in range(2):  # again, as after another kill
            tidy(place, index.id)
            assert generation_in(place) == 1
        save_generation(place, 3)
        assert [path.name for path in place.parent.iterdir()] == ["run"]


def test_foreign_files_stay_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save_generation(folder, 1)
    foreign = ("model.safetensors", "config.json", ".index.json", "notes-rank-1.txt", "abc.safetensors")
    for name in foreign:
        (folder / name).touch()
    (folder / "more").mkdir()
    stale = ("0123456789abcdef-rank-00000-of-00001.safetensors", ".index.json.0123456789ab", "index.previous.json")
    for name in stale:
        (folder / name).touch()  # of an earlier version
    save_generation(folder, 2)
    assert generation_in(folder) == 2
    names = {path.name for path in folder.iterdir()}
    assert names >= {*foreign, "more"}
    assert not names & set(stale)
    # One that came meanwhile is not replaced by one of that name that a killed save had put aside.
    index = write(folder, states(3), values={"generation": 3}, step=3)
    commit_written(folder, index)
    (folder / "config.json").write_text("new")
    with pytest.raises(FileError, match="not empty"):
        remove_old(folder)
    assert (folder / "config.json").read_text() == "new"
    assert [path.name for path in old_folder(folder, index.id).iterdir()] == ["config.json"]


def test_a_checkpoint_of_an_earlier_version_whose_commit_was_cut_off_is_known(tmp_path: Path) -> None:
    """It had the index before it in the same folder, if there were several file systems."""
    first = save_generation(tmp_path / "one", 1)
    second = save_generation(tmp_path / "run", 2)
    for path in (tmp_path / "one").iterdir():
        name = "index.previous.json" if path.name == "index.json" else path.name
        path.rename(tmp_path / "run" / name)
    assert known_checkpoints(tmp_path / "run") == [(tmp_path / "run", second), (tmp_path / "run", first)]
    assert tidy(tmp_path / "run", first.id) == []
    assert generation_in(tmp_path / "run") == 2


def test_a_checkpoint_that_was_put_aside_is_found_by_its_name(tmp_path: Path) -> None:
    save_generation(tmp_path / "step-00000001", 1)
    aside = old_folder(tmp_path / "step-00000001", "0badcafe")
    (tmp_path / "latest").symlink_to("step-00000001")
    (tmp_path / "step-00000001").rename(aside)
    write(tmp_path / "step-00000002", states(2))
    assert found_in(tmp_path) == ([aside], [])
    for name in ("step-00000001", "latest"):
        assert generation_in(tmp_path / name) == 1
        assert [where for where, _ in known_checkpoints(tmp_path / name)] == [aside]
    assert remove_checkpoint(aside)


def test_a_copy_that_somebody_has_made_is_none_that_was_put_aside(tmp_path: Path) -> None:
    names = ("run.old", "run.1.old", "run.part", "run.0badcafe.part.old")
    for name in names:
        save_generation(tmp_path / name, 1)
    save_generation(tmp_path / "run", 2)
    save_generation(tmp_path / "run", 3)
    assert [generation_in(tmp_path / name) for name in names] == [1] * len(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "run"])


def test_a_checkpoint_is_read_from_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    save_generation(tmp_path / "run", 1)

    class Private(Files):
        def call(self, operation, path, function, *args):  # type: ignore[no-untyped-def]
            if operation == "list":
                raise FileError(errno.EACCES, "Permission denied", path, operation)
            return super().call(operation, path, function, *args)

    ((where, index),) = known_checkpoints(tmp_path / "run", files=Private())
    assert (where, index.step) == (tmp_path / "run", 1)
    with open_checkpoint(tmp_path / "run", files=Private()) as saved:
        assert saved.value("generation") == 1
    with pytest.raises(FileError, match="Permission denied"):
        list(newest_checkpoints(tmp_path, [], files=Private()))


# --- disks that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "forever", "old"), [(errno.ENOSPC, True, 1), (errno.EIO, False, 1), (errno.EIO, False, 0)]
)
def test_a_failure_at_any_operation_leaves_the_old_or_the_new(
    tmp_path: Path, code: int, forever: bool, old: int
) -> None:
    recorded = RecordingFiles()
    before: dict[str, bytes] = {}
    if old:
        save_generation(tmp_path / "first" / "run", old)
        before = contents(tmp_path / "first")
    save_generation(tmp_path / "first" / "run", old + 1, files=recorded)
    at, failed = 0, True
    while failed:
        at += 1
        root = lay_out(tmp_path / f"{at}", before)
        folder = root / "run"
        crash, files = Crash(root), FailingFiles(at, code, forever=forever)
        try:
            save_generation(folder, old + 1, files=files)
            failed = False
        except FileError as error:
            assert error.errno == code  # noqa: PT017
        assert generation_or_0(folder) in ((old, old + 1) if failed else (old + 1,))
        # The machine crashes on top of it.
        for operation in files.log:
            crash.do(operation)
        for what, content in crash.outcomes(seeds=1):
            if what != "kept":  # which is what has just been looked at
                place = lay_out(tmp_path / f"{at}-{what.replace(' ', '-')}", content)
                assert generation_or_0(place / "run") in (old, old + 1)
        save_generation(folder, old + 2)
        assert generation_in(folder) == old + 2
        assert len(list(folder.iterdir())) == 3, "something is left behind"
        assert list(root.iterdir()) == [folder], "something is left behind"
    assert at > len(recorded.log)


def test_a_failed_save_leaves_no_files_that_fill_the_disk(tmp_path: Path) -> None:
    """The disk is full in the middle of the data: the old checkpoint is as it was, and the room is given back."""
    save_generation(tmp_path / "run", 1)
    before = contents(tmp_path)
    with pytest.raises(FileError, match="No space left"):
        save_generation(tmp_path / "run", 2, files=FailingFiles(4, only=("write",)))
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_commit_that_could_not_be_synchronised_keeps_both(tmp_path: Path) -> None:
    """The disk may have either of the two names until the folder around them is synchronised."""
    folder = tmp_path / "run"
    first = save_generation(folder, 1)
    index = write(folder, states(2), values={"generation": 2}, step=2)
    with pytest.raises(FileError):
        commit_written(folder, index, files=FailingFiles(2, only=("sync_folder",)))
    assert [index.id for _, index in known_checkpoints(folder)] == [index.id, first.id]
    assert generation_in(folder) == 2
    assert not part_folder(folder, index.id).exists()


def test_short_transfers_save_and_load_the_same(tmp_path: Path) -> None:
    tensor = torch.arange(SPAN_BYTES // 2, dtype=torch.int32)
    save(tmp_path, {"weight/w": tensor}, files=ShortFiles())
    with open_checkpoint(tmp_path, files=ShortFiles(1)) as saved:
        assert torch.equal(saved.read("weight/w"), tensor)


def test_a_disk_that_cannot_be_read_is_no_damaged_checkpoint(tmp_path: Path) -> None:
    save_generation(tmp_path, 1)

    class Broken(Files):
        def call(self, operation, path, function, *args):  # type: ignore[no-untyped-def]
            if operation == "list" or (operation == "read" and path.endswith(".safetensors")):
                raise FileError(errno.EIO, "Input/output error", path, operation)
            return super().call(operation, path, function, *args)

    with pytest.raises(FileError, match="Input/output error"):
        list(newest_checkpoints(tmp_path, [], files=Broken()))
    with open_checkpoint(tmp_path, files=Broken()) as saved:
        with pytest.raises(CheckpointError, match="Input/output error") as caught:
            saved.read("weight/a")
        assert type(caught.value) is CheckpointError
    assert len(verify(tmp_path, files=Broken())) == 2


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def saving_child(folder: Path, first: int) -> tuple[int, int]:
    """A process that saves one generation after the other, and says which ones are committed: (its id, what to
    read)."""
    hear, say = os.pipe()
    child = os.fork()
    if child:
        os.close(say)
        return child, hear
    try:
        os.close(hear)
        os.write(say, b"ready\n")
        for generation in range(first, 10**6):
            save_generation(folder, generation)
            os.write(say, b"%d\n" % generation)
    finally:
        os._exit(1)


def kill_often(folder: Path, kills: int) -> set[str]:
    folder.mkdir()
    dice, committed, outcomes = random.Random(0), 0, set()
    for _ in range(kills):
        child, hear = saving_child(folder, committed + 1)
        with os.fdopen(hear) as heard:
            assert heard.readline() == "ready\n"
            time.sleep(dice.uniform(0, 0.15))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            said = max([committed, *(int(line) for line in heard.read().split())])
        found = generation_or_0(folder)
        assert said <= found <= said + 1
        outcomes.add("new" if found > said else "old")
        committed = found
    return outcomes


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_killed_process_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    assert kill_often(tmp_path / "run", 8)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_killed_a_hundred_times_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    assert kill_often(tmp_path / "run", 100) == {"old", "new"}
