"""File operations: whole transfers, typed errors, atomic files, direct transfers where they can be, and a bounded page
cache."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from elixir import files as module
from elixir.errors import ElixirError, FileError, InputError
from elixir.files import DIRECT_BYTES, FILES, Files, aligned_buffer
from tests.common.file_faults import FailingFiles, RecordingFiles


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_system_that_writes_nothing_is_no_endless_loop(tmp_path: Path) -> None:
    class Stuck(Files):
        def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
            return 0 if operation == "write" else super().call(operation, path, function, *args)

    with Stuck().create(tmp_path / "a") as file, pytest.raises(FileError, match="wrote nothing"):
        file.write(b"x", 0)


def test_errors_have_the_path_and_the_errno(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for attempt in (
        lambda: FILES.open(missing),
        lambda: FILES.size(missing),
        lambda: FILES.remove(missing),
        lambda: FILES.names(missing),
        lambda: FILES.sync_folder(missing),
        lambda: FILES.create(missing / "a"),
        lambda: FILES.read_whole(missing),
        lambda: FILES.free_bytes(missing),
    ):
        with pytest.raises(FileError) as caught:
            attempt()
        error = caught.value
        assert isinstance(error, OSError)
        assert isinstance(error, ElixirError)
        assert error.errno == errno.ENOENT
        assert str(missing) in error.filename
        assert str(missing) in str(error)
        assert "No such file" in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(FileError, match="regular"):
        FILES.size(tmp_path)
    with pytest.raises(FileError) as caught:
        FILES.open("a\0b")
    assert caught.value.errno == errno.EINVAL
    FILES.remove(missing, missing_ok=True)
    (tmp_path / "there").touch()
    with pytest.raises(FileError) as caught:
        FILES.create(tmp_path / "there")
    assert caught.value.errno == errno.EEXIST


def test_a_failed_synchronisation_stays_failed(tmp_path: Path) -> None:
    """The system reports the loss of a page once; success of a second attempt would mean nothing."""
    with FailingFiles(1, errno.EIO, only=("sync",)).create(tmp_path / "a") as file:
        file.write(b"x", 0)
        for _ in range(2):
            with pytest.raises(FileError) as caught:
                file.sync()
            assert caught.value.errno == errno.EIO


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    recorded = RecordingFiles()
    recorded.write_whole(path, b"new")
    assert [each.name for each in recorded.log] == ["create", "write", "sync", "rename"]
    for at in range(1, 5):
        path.write_bytes(b"old")
        with pytest.raises(FileError):
            FailingFiles(at).write_whole(path, b"new")
        assert path.read_bytes() == b"old"
        assert names(tmp_path) == ["a"]


def test_a_link_where_there_are_none_is_a_copy(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    FILES.link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")
    files = FailingFiles(1, errno.EPERM, only=("link",))
    files.link(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"content"
    with pytest.raises(FileError) as caught:
        FailingFiles(1, errno.EIO, only=("link",)).link(tmp_path / "a", tmp_path / "d")
    assert caught.value.errno == errno.EIO


def test_a_file_too_large_to_be_what_is_wanted_is_not_read(tmp_path: Path) -> None:
    with FILES.create(tmp_path / "a", 2**40):  # a hole; no byte is on the disk
        pass
    with pytest.raises(FileError) as caught:
        FILES.read_whole(tmp_path / "a", limit_bytes=1000)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.parametrize("refusal", [None, "create", "write"])
def test_direct_transfers_where_the_file_system_takes_them(tmp_path: Path, refusal: str | None) -> None:
    """Refused at the opening or at the first transfer, the page cache takes part, and the file says so."""

    class RefusesToOpen(Files):
        def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
            result = super().call(operation, path, function, *args)
            if operation == "create" and args[1] & getattr(os, "O_DIRECT", 0):
                os.close(result)  # the file is there all the same, as older kernels leave it
                raise FileError(errno.EINVAL, "no", path, operation)
            return result

    buffer = aligned_buffer(DIRECT_BYTES + 1)
    assert len(buffer) == 2 * DIRECT_BYTES
    buffer[:] = os.urandom(len(buffer))
    refusing = {"create": RefusesToOpen(), "write": FailingFiles(1, errno.EINVAL, only=("write",))}
    files = refusing[refusal] if refusal else FILES
    with files.create(tmp_path / "a", direct=True) as file:
        file.write(buffer, DIRECT_BYTES)
        assert not (refusal and file.is_direct)
        back = aligned_buffer(len(buffer))
        assert file.read_into(back, DIRECT_BYTES) == len(back)
        assert back[:] == buffer[:]
    assert (tmp_path / "a").read_bytes() == bytes(DIRECT_BYTES) + buffer[:]


def test_direct_transfers_off_a_block_are_refused(tmp_path: Path) -> None:
    with FILES.create(tmp_path / "a", direct=True) as file:
        if not file.is_direct:
            pytest.skip("this file system knows no direct transfers")
        for data, offset in ((bytes(100), 0), (bytes(DIRECT_BYTES), 5)):
            with pytest.raises(InputError, match="multiples of 4096"):
                file.write(data, offset)


def test_a_file_that_keeps_its_name_is_not_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system knows no unnamed files, it has a name first, which the system may refuse to take away."""
    monkeypatch.setattr(os, "O_TMPFILE", 0)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileError, match="Input/output error"):
        FailingFiles(1, errno.EIO, only=("remove",)).create_unnamed(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_all_of_it_goes_through_one_place() -> None:
    """Modules that must survive a crash call the operating system through `Files` alone."""
    package = Path(module.__file__).parent
    for path in (*package.glob("checkpoint_format/*.py"), package / "artifact.py"):
        text = path.read_text(encoding="utf-8")
        for name in (
            "open(",
            "fsync",
            "os.replace",
            "os.rename",
            "os.link",
            "unlink",
            "write_text",
            "write_bytes",
            "shutil",
        ):
            found = [
                line for line in text.splitlines() if name in line and "files.open(" not in line and "open_" not in line
            ]
            assert not found, f"{path.name}: {found}"
