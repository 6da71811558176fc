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

from elixir.checkpoint_format.folders import (
    abandon,
    commit,
    finish_commit,
    newest_checkpoints,
    read_index,
    remove_stale,
)
from elixir.checkpoint_format.index import Index
from elixir.checkpoint_format.slice_reader import open_checkpoint, verify
from elixir.checkpoint_format.slices import SPAN_BYTES
from elixir.errors import CheckpointError, CheckpointNotFound, FileError
from elixir.files import Files
from tests.common.checkpoints import save, write
from tests.common.file_faults import Crash, FailingFiles, RecordingFiles, ShortFiles, UnsyncedFiles


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


def lay_out(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, raw in content.items():
        (folder / name).write_bytes(raw)
    return folder


@pytest.mark.parametrize("before", ["nothing", "checkpoint", "settled never", "killed"])
def test_every_prefix_of_a_save_leaves_the_old_or_the_new(tmp_path: Path, before: str) -> None:
    """Also with all or a part of what was not synchronised dropped: bytes, names and renames."""
    folder = tmp_path / "run"
    folder.mkdir()
    if before != "nothing":
        save_generation(folder, 1)
    if before == "settled never":
        commit(folder, write(folder, states(2), values={"generation": 2}, step=2))
    if before == "killed":
        write(folder, states(9))
    old = 0 if before == "nothing" else generation_in(folder)
    new = old + 1
    crash, recorded = Crash(folder), RecordingFiles()
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
                place = lay_out(tmp_path / f"left-{len(found)}", content)
                found[left] = generation_or_0(place)
                if len(found) % 5 == 0:
                    # The next run finds its way, and leaves nothing behind.
                    save_generation(place, new + 1)
                    assert generation_in(place) == new + 1
                    assert len(list(place.iterdir())) == 3
            assert found[left] in (old, new), (number, what)
            if what == "kept" and found[left] == new:
                committed_at = min(committed_at, number)
            assert found[left] == new or number < len(recorded.log), "what was said to be committed is not there"
    assert set(found.values()) == {old, new}
    assert committed_at < len(recorded.log)


# --- several file systems --------------------------------------------------------------------------------------------


def test_file_systems_that_commit_at_different_moments_keep_what_all_have(tmp_path: Path) -> None:
    """One file system has committed, the other has not when both are killed: both go on with the one before."""
    places = [tmp_path / name for name in "ab"]
    for place in places:
        save_generation(place, 1)
    old = [read_index(place) for place in places]
    new = [write(place, states(2), values={"generation": 2}, step=2) for place in places]
    commit(places[0], new[0])
    assert read_index(places[0], previous=True) == old[0]
    # ... and killed. Nothing that either index names is stale yet.
    assert remove_stale(places[0]) == ()
    for place, index in zip(places, old, strict=True):
        finish_commit(place, index.id)
        finish_commit(place, index.id)  # again, as after another kill
        remove_stale(place)
        assert generation_in(place) == 1
        assert len(list(place.iterdir())) == 3
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        finish_commit(places[0], new[0].id)


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
        save_generation(tmp_path / "first", old)
        before = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    save_generation(tmp_path / "first", old + 1, files=recorded)
    at, failed = 0, True
    while failed:
        at += 1
        folder = lay_out(tmp_path / f"{at}", before)
        crash, files = Crash(folder), FailingFiles(at, code, forever=forever)
        try:
            save_generation(folder, old + 1, files=files)
            failed = False
        except FileError as error:
            assert error.errno == code  # noqa: PT017
        if old or not failed or (folder / "index.json").exists():
            assert generation_in(folder) in (old, old + 1)
        # The machine crashes on top of it.
        for operation in files.log:
            crash.do(operation)
        for what, content in crash.outcomes(seeds=1):
            if what != "kept":  # which is what has just been looked at
                assert generation_or_0(lay_out(tmp_path / f"{at}-{what.replace(' ', '-')}", content)) in (old, old + 1)
        save_generation(folder, old + 2)
        assert generation_in(folder) == old + 2
        assert len(list(folder.iterdir())) == 3, "something is left behind"
    assert at > len(recorded.log)


def test_a_commit_that_could_not_be_synchronised_is_taken_back(tmp_path: Path) -> None:
    save_generation(tmp_path, 1)
    index = write(tmp_path, states(2))
    with pytest.raises(FileError):
        commit(tmp_path, index, files=FailingFiles(2, only=("sync_folder",)))
    assert generation_in(tmp_path) == 1
    assert all(
        (tmp_path / name).exists() for name in index.files
    )  # the disk may name them until the folder is synchronised
    with pytest.raises(FileError):
        abandon(tmp_path, index.id, files=FailingFiles(1, only=("sync_folder",)))
    assert all((tmp_path / name).exists() for name in index.files)
    abandon(tmp_path, index.id)
    assert not any((tmp_path / name).exists() for name in index.files)


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
