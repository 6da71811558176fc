"""The disk's measurement: past the page cache, without a trace of it left, and refused where it cannot be done."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from elixir.errors import InputError
from elixir.files import DIRECT_BYTES
from elixir.hardware.profile import HardwareProfile
from elixir.microbench import disk, machine, measure
from elixir.microbench.bench import Bench, Job
from elixir.microbench.disk import check_folder, disk_jobs, disk_series, file_system
from elixir.microbench.fitting import Series
from elixir.units import MIB
from tests.common.profile_scripts import frame

QUICK = Bench(torch.device("cpu"), quick=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FILE_BYTES", {True: 4 * MIB, False: 4 * MIB})
    monkeypatch.setattr(disk, "WINDOW_S", {True: 1e-3, False: 1e-3})


@pytest.mark.parametrize("direct", [True, False])
def test_both_ways_are_measured_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    dropped: list[int] = []
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: (dropped.append(args[3]), advise(*args)))
    found = disk_series(QUICK, tmp_path)
    assert tuple(series.key for series in found) == disk.KEYS
    for series in found:
        assert frame.unit_of(series) == "bytes"
        assert [amount for amount, _ in series.points] == sorted({amount for amount, _ in series.points})
        assert all(amount % DIRECT_BYTES == 0 and seconds > 0 for amount, seconds in series.points)
        assert ("pages dropped" in series.how) >= (not direct)
    # Where the page cache takes part, what it holds goes after every transfer.
    assert direct or dropped.count(os.POSIX_FADV_DONTNEED) >= sum(len(s.points) * s.repeats for s in found[:3])
    assert list(tmp_path.iterdir()) == []


def test_writes_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[int] = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda handle: (synchronised.append(handle), sync(handle)))
    write, *_ = disk_series(QUICK, tmp_path)
    assert len(synchronised) >= len(write.points) * write.repeats


def test_a_file_is_gone_even_if_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InputError, match="No space left"):
        disk_series(QUICK, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InputError, match="no folder"):
        disk_jobs(QUICK, tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="no folder"):
        check_folder(tmp_path / "file")
    monkeypatch.setattr(disk, "FILE_BYTES", {True: 1 << 60, False: 1 << 60})
    with pytest.raises(InputError, match="free"):
        check_folder(tmp_path)
    monkeypatch.setattr(disk, "FILE_BYTES", {True: 1, False: 1})
    monkeypatch.setattr("elixir.extents.extent_file.file_system", lambda _: "tmpfs")
    with caplog.at_level(logging.WARNING):
        assert check_folder(tmp_path) == tmp_path
        with disk.measured_file([tmp_path], MIB):
            pass
    assert "memory and no disk" in caplog.text


def test_a_system_that_does_not_say_its_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(tmp_path)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError(2, "absent")))
    assert file_system(tmp_path) == "unknown"


def test_a_measured_profile_knows_the_disk_only_where_a_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_jobs = machine.machine_jobs

    @dataclass(frozen=True)
    class Fake(Job):
        def series(self) -> list[Series]:
            return [Series(key, ((1e6, 1e-3), (2e6, 2e-3), (4e6, 4e-3)), 3, "a test") for key in self.keys]

    def fakes(bench: Bench) -> list[Job]:
        return [Fake(job.title, job.keys) for job in all_jobs(bench)]

    monkeypatch.setattr(machine, "machine_jobs", fakes)
    without = measure(quick=True)
    assert not without.knows_disk
    profile = measure(quick=True, disk_folder=tmp_path)
    assert profile.knows_disk
    assert profile.disk_free_bytes
    for name in ("disk_read_bytes_per_s", "disk_write_bytes_per_s"):
        assert getattr(profile, name) > 0
        assert "one file on" in profile.sources[name]
    assert HardwareProfile.load(profile.save(tmp_path / "hw.json")) == profile
    both = measure(quick=True, disk_folder=[tmp_path, tmp_path])
    assert both.sources["disk_read_bytes_per_s"].count("one file on") == 2
    with pytest.raises(InputError, match="no folder"):
        measure(quick=True, disk_folder=[tmp_path, tmp_path / "absent"])


def test_a_system_without_a_way_past_the_page_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    with pytest.raises(InputError, match="no way past the page cache"), disk.measured_file([tmp_path], MIB):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(disk.FILES, "create_unnamed", full)
    with pytest.raises(InputError, match="cannot be written: Read-only file system"):
        check_folder(tmp_path)
