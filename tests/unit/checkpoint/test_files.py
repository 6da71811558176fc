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
from elixir.files import BEGIN_BYTES, DIRECT_BYTES, FILES, Files, aligned_buffer
from tests.common.file_faults import FailingFiles, Operation, RecordingFiles, ShortFiles


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_pieces_go_where_they_belong(tmp_path: Path) -> None:
    with FILES.create(tmp_path / "a", 10) as file:
        file.write(b"cd", 2)
        file.write(memoryview(bytearray(b"ab")), 0)
        file.sync()
    assert (tmp_path / "a").read_bytes() == b"abcd" + bytes(6)
    buffer = bytearray(8)
    with FILES.open(tmp_path / "a") as file:
        assert file.read_into(buffer, 1) == 8
        assert file.read_into(bytearray(8), 7) == 3  # the file ends
    assert bytes(buffer) == b"bcd" + bytes(5)
    assert FILES.size(tmp_path / "a") == 10


@pytest.mark.parametrize("seed", range(3))
def test_short_transfers_are_carried_on(tmp_path: Path, seed: int) -> None:
    files, content = ShortFiles(seed), os.urandom(300_000)
    with files.create(tmp_path / "a") as file:
        file.write(content, 5)
    assert files.read_whole(tmp_path / "a") == bytes(5) + content


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


def test_folders_are_made_with_names_that_survive(tmp_path: Path) -> None:
    files = RecordingFiles()
    files.make_folder(tmp_path / "a" / "b")
    expected = [
        Operation("make", str(tmp_path / "a")),
        Operation("sync_folder", str(tmp_path)),
        Operation("make", str(tmp_path / "a" / "b")),
        Operation("sync_folder", str(tmp_path / "a")),
    ]
    assert files.log == expected
    files.make_folder(tmp_path / "a" / "b")
    assert files.log == expected
    (tmp_path / "file").touch()
    with pytest.raises(FileError):
        files.make_folder(tmp_path / "file")


def test_a_file_too_large_to_be_what_is_wanted_is_not_read(tmp_path: Path) -> None:
    with FILES.create(tmp_path / "a", 2**40):  # a hole; no byte is on the disk
        pass
    with pytest.raises(FileError) as caught:
        FILES.read_whole(tmp_path / "a", limit_bytes=1000)
    assert caught.value.errno == errno.EFBIG


def test_what_is_written_does_not_pile_up_in_the_page_cache(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watched(Files):
        def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
            seen.append(operation)
            return super().call(operation, path, function, *args)

    with Watched().create(tmp_path / "a", flush_every_bytes=1000) as file:
        for number in range(10):
            file.write(bytes(500), number * 500)
    assert seen == ["create", *["write", "write", "sync", "drop"] * 5, "close"]


def test_a_large_piece_goes_on_its_way_to_the_drive_at_once(tmp_path: Path) -> None:
    begun: list[tuple[Any, ...]] = []

    class Watched(Files):
        def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
            if operation == "drop":
                begun.append(args[1:3])
            return super().call(operation, path, function, *args)

    with Watched().create(tmp_path / "a", flush_every_bytes=8 * BEGIN_BYTES) as file:
        file.write(bytes(BEGIN_BYTES), 4096)
        file.write(bytes(10), 0)  # the drive would get its page twice
    with Watched().create(tmp_path / "b") as file:
        file.write(bytes(BEGIN_BYTES), 0)  # the system decides when
    assert begun == [(4096, BEGIN_BYTES)]


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


def test_an_unnamed_file_is_gone_whatever_happens(tmp_path: Path) -> None:
    def fail() -> None:
        with FILES.create_unnamed(tmp_path) as file:
            file.write(b"x", 0)
            assert names(tmp_path) == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == []
    with pytest.raises(FileError, match="Input/output error"):  # not the error of a system without such files
        FailingFiles(1, errno.EIO, only=("create",)).create_unnamed(tmp_path)


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
