"""How free memory of host and device is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elixir.errors import InputError
from elixir.hardware import memory as free_memory
from elixir.hardware.memory import free_device_bytes, free_host_bytes, total_host_bytes

GIB = 2**30


def test_free_host_memory_is_below_the_total() -> None:
    assert 0 < free_host_bytes() <= total_host_bytes()
    assert 0 < free_device_bytes("cpu") <= total_host_bytes()


def test_devices_that_are_not_there_are_refused() -> None:
    for device in ("tpu", "mps", "meta"):
        with pytest.raises(InputError):
            free_device_bytes(device)
    with pytest.raises(InputError, match="cuda"):
        free_device_bytes(f"cuda:{torch.cuda.device_count()}")


def test_a_system_that_does_not_tell_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_meminfo_bytes", lambda name: None)
    monkeypatch.setattr(free_memory, "_sysconf_bytes", lambda name: None)
    with pytest.raises(InputError, match="does not report free memory; give the host memory"):
        free_host_bytes()
    with pytest.raises(InputError, match="does not report its memory size"):
        total_host_bytes()


def write(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_tightest_control_group_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("0::/job/step\n")
    write(
        tmp_path / "v2/job", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"anon 7\ninactive_file {GIB}"
    )
    write(tmp_path / "v2/job/step", memory__max="max", memory__current=3 * GIB)
    assert list(free_memory._cgroup_memory(tmp_path / "v2", member)) == [(8 * GIB, 4 * GIB)]


def test_first_version_control_groups_are_read(tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("9:name=systemd:/x\n4:cpu,memory:/not/in/this/namespace\n0::/\n")
    write(tmp_path / "fs/memory", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=2 * GIB)
    assert list(free_memory._cgroup_memory(tmp_path / "fs", member)) == [(6 * GIB, 2 * GIB)]


def test_a_control_group_limit_caps_free_and_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_cgroup_memory", lambda: iter([(3 * 2**20, 2**20), (2**40, 0)]))
    assert free_host_bytes() == 2 * 2**20
    assert total_host_bytes() == 3 * 2**20
    monkeypatch.setattr(free_memory, "_cgroup_memory", lambda: iter([(2**20, 2**21)]))
    assert free_host_bytes() == 0


class FakeCuda:
    """The calls `free_device_bytes` makes, answered without a device."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 1

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return (10 + index, 100)

    def memory_reserved(self, index: int) -> int:
        return 50

    def memory_allocated(self, index: int) -> int:
        return 20


def test_memory_that_our_own_allocator_caches_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", FakeCuda())
    assert free_device_bytes(0) == free_device_bytes("cuda:0") == 10 + 30
    assert free_device_bytes("cuda") == 11 + 30
    with pytest.raises(InputError, match="has 2 CUDA devices|machine has 2"):
        free_device_bytes("cuda:2")
