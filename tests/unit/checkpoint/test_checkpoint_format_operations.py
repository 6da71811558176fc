"""The file operations of writers, commits, removals and exports, in order: what must be on the disk before what."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.checkpoint_format.export import export_hf
from elixir.checkpoint_format.folders import abandon, commit, finish_commit, read_index, remove_checkpoint
from elixir.checkpoint_format.index import Index
from elixir.checkpoint_format.slice_reader import OPEN_FILES, SliceReader
from elixir.checkpoint_format.slices import HEADER_MULTIPLE_BYTES, SPAN_BYTES, Slice, SliceWriter
from elixir.errors import CheckpointError, FileError
from elixir.files import Files
from tests.common.checkpoints import save, write
from tests.common.file_faults import FailingFiles, RecordingFiles

TENSORS = {"weight/w": torch.arange(3.0), "buffer/b": torch.arange(2.0)}
NEW_INDEX = ["create new index", "write new index", "sync new index", "rename new index to index"]
LINK = "link index to previous"
TAKE_BACK = ["rename previous to index", "remove previous"]
"""One of the two has nothing to do: a rename of a file to another of its names leaves both."""


def operations(files: RecordingFiles, folder: Path) -> list[str]:
    """Says what was done, without random parts of names."""

    def name(path: str) -> str:
        if path == str(folder):
            return "folder"
        plain = re.sub(r"^[0-9a-f]{16}-", "", os.path.basename(path))
        plain = re.sub(r"^\.(.*)\.[0-9a-f]{12}$", r"new \1", plain)
        return (
            plain.replace("index.previous.json", "previous").replace("index.json", "index").removesuffix(".safetensors")
        )

    return [
        f"{each.name} {name(each.source)} to {name(each.path)}" if each.source else f"{each.name} {name(each.path)}"
        for each in files.log
    ]


class DroppingFiles(RecordingFiles):
    """Also notes which files the page cache need not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[str] = []

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation == "drop":
            self.dropped.append(path)
        return super().call(operation, path, function, *args)


def uncommitted(folder: Path) -> Index:
    return write(folder, TENSORS, world_size=1)


def test_commits_settle_and_abandon_in_this_order(tmp_path: Path) -> None:
    first = uncommitted(tmp_path)
    commit(tmp_path, first, files=(files := RecordingFiles()))
    assert operations(files, tmp_path) == ["sync_folder folder", *NEW_INDEX, "sync_folder folder"]
    finish_commit(tmp_path, first.id, files=(files := RecordingFiles()))
    assert operations(files, tmp_path) == ["sync_folder folder"]
    second = uncommitted(tmp_path)
    commit(tmp_path, second, files=(files := RecordingFiles()))
    assert operations(files, tmp_path) == [LINK, "sync_folder folder", *NEW_INDEX, "sync_folder folder"]
    finish_commit(tmp_path, first.id, files=(files := RecordingFiles()))
    assert operations(files, tmp_path) == ["rename previous to index", "sync_folder folder"]
    abandon(tmp_path, second.id, files=(files := RecordingFiles()))
    assert operations(files, tmp_path) == ["sync_folder folder", "remove rank-00000-of-00001"]
    third = uncommitted(tmp_path)
    commit(tmp_path, third)
    finish_commit(tmp_path, third.id, files=(files := RecordingFiles()))
    assert operations(files, tmp_path) == ["remove previous", "sync_folder folder"]
    assert remove_checkpoint(tmp_path, files=(files := RecordingFiles()))
    assert operations(files, tmp_path)[:2] == ["remove index", "sync_folder folder"]
    assert sorted(operations(files, tmp_path)[2:-1]) == ["remove rank-00000-of-00001"] * 2
    assert operations(files, tmp_path)[-1] == "remove folder"
    assert not tmp_path.exists()


@pytest.mark.parametrize("replacing", [False, True])
def test_a_commit_that_fails_anywhere_leaves_what_was_there(tmp_path: Path, replacing: bool) -> None:
    if replacing:
        save(tmp_path, TENSORS)
    index = uncommitted(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = [LINK] * replacing + ["sync_folder folder", *NEW_INDEX]
    for at in range(len(done)):
        with pytest.raises(FileError):
            commit(tmp_path, index, files=(files := FailingFiles(at + 1)))
        assert operations(files, tmp_path)[:at] == done[:at]
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(FileError):
        commit(tmp_path, index, files=(files := FailingFiles(len(done) + 1)))
    assert operations(files, tmp_path) == [*done, TAKE_BACK[0] if replacing else "remove index"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    commit(tmp_path, index)
    assert read_index(tmp_path).id == index.id


def test_a_written_file_is_reserved_synchronised_and_let_go(tmp_path: Path) -> None:
    files, values = DroppingFiles(), torch.arange(5, dtype=torch.int8)
    writer = SliceWriter(tmp_path / "a", [Slice("k", (5,), torch.int8, 0, 5)], files=files)
    writer.write_tensor("k", values)
    before = threading.active_count()
    written = writer.finish()
    assert threading.active_count() == before - 1, "the thread that made checksums is over"
    assert operations(files, tmp_path) == ["create a", "resize a", "write a", "write a", "sync a"]
    assert [each.offset for each in files.log] == [0, HEADER_MULTIPLE_BYTES + 5, 0, HEADER_MULTIPLE_BYTES, 0]
    assert files.dropped == [str(tmp_path / "a")]
    assert written.nbytes == (tmp_path / "a").stat().st_size == HEADER_MULTIPLE_BYTES + 5
    assert str(tmp_path / "a") not in open_paths()
    other = SliceWriter(tmp_path / "b", [Slice("k", (5,), torch.int8, 0, 5)], files=files)
    other.write_tensor("k", values)
    other.abandon()
    assert threading.active_count() == before - 1
    assert operations(files, tmp_path)[-1] == "remove b"
    with pytest.raises(FileError):
        SliceWriter(tmp_path / "b", [Slice("k", (5,), torch.int8, 0, 5)], files=FailingFiles(1, only=("write",)))
    assert threading.active_count() == before - 1
    assert not (tmp_path / "b").exists()
    assert str(tmp_path / "b") not in open_paths()


def test_an_export_has_all_its_files_on_the_disk_before_one_has_its_name(tmp_path: Path) -> None:
    save(tmp_path / "saved", TENSORS)
    files = DroppingFiles()
    export_hf(tmp_path / "saved", tmp_path / "out", max_shard_size=12, config={"a": 1}, files=files)
    shards = [f"model-0000{number}-of-00002" for number in (1, 2)]
    texts = ["config.json", "model.safetensors.index"]
    made = [f"{what} new {shard}" for shard in shards for what in ("create", "resize", *["write"] * 3, "sync")]
    made += [f"{what} new {text}" for text in texts for what in ("create", "write", "sync")]
    found = operations(files, tmp_path / "out")
    assert found[:2] == ["make folder", f"sync_folder {tmp_path.name}"]
    assert found[2:-5] == made
    assert all(f".{shard}." in path for shard, path in zip(shards, files.dropped, strict=True))
    assert [each.rpartition(" to ")[2] for each in found[-5:-1]] == [*shards, *texts]
    assert found[-1] == "sync_folder folder"
    assert not any(str(tmp_path) in path for path in open_paths())


def test_files_are_closed_when_what_reads_them_is_done(tmp_path: Path) -> None:
    """One small read from each of many files waits in a batch, which must go before its file is closed."""
    tensors = {"weight/w": torch.arange(2.0 * OPEN_FILES)}
    save(tmp_path, tensors, world_size=2 * OPEN_FILES)

    class Late(Files):
        def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
            if operation == "read" and path.endswith(".safetensors"):
                time.sleep(0.002)
            return super().call(operation, path, function, *args)

    out = torch.zeros(2 * OPEN_FILES)
    with SliceReader(tmp_path, files=Late()) as reader:
        reader.read_into("weight/w", 0, out)
    assert torch.equal(out, tensors["weight/w"])


def test_large_reads_are_made_by_threads_that_end_with_the_reader(tmp_path: Path) -> None:
    save(tmp_path, {"weight/w": torch.arange(SPAN_BYTES // 2)}, world_size=1)  # two spans of int64
    threads = set[str]()

    class Watched(Files):
        def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
            if operation == "read" and path.endswith(".safetensors"):
                threads.add(threading.current_thread().name.partition("_")[0])
            return super().call(operation, path, function, *args)

    with SliceReader(tmp_path, files=Watched()) as reader:
        reader.read("weight/w", 1, 1000)
        assert threads == {"MainThread"}, "a part of a span goes through separate memory"
        threads.clear()
        reader.read("weight/w")
        assert threads == {"elixir load"}
    assert not any(thread.name.startswith("elixir load") for thread in threading.enumerate())


def test_nothing_is_written_to_a_callers_tensor_after_an_error(tmp_path: Path) -> None:
    """One thread fails at once while another still reads."""
    tensors = {"weight/a": torch.ones(SPAN_BYTES // 4), "weight/b": torch.ones(SPAN_BYTES // 4)}
    save(tmp_path, tensors, world_size=1)
    failed = threading.Event()

    class FirstFails(Files):
        def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
            if operation == "read" and path.endswith(".safetensors"):
                if not failed.is_set():
                    failed.set()
                    raise FileError(errno.EIO, "Input/output error", path, operation)
                time.sleep(0.05)
            return super().call(operation, path, function, *args)

    out = [torch.zeros(SPAN_BYTES // 4) for _ in tensors]
    with SliceReader(tmp_path, files=FirstFails()) as reader:
        for key, each in zip(tensors, out, strict=True):
            reader.begin_to_read(key, 0, each)
        with pytest.raises(CheckpointError, match="Input/output error"):
            reader.finish()
        left = [each.clone() for each in out]
        time.sleep(0.1)
        assert all(map(torch.equal, out, left))
        assert sorted(bool(each.all()) for each in out) == [False, True]


def open_paths() -> list[str]:
    """The files that this process has open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(each))
        except FileNotFoundError:
            continue  # that of the listing itself
    return found
