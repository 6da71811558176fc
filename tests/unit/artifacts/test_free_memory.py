"""How free memory of host and device is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from elixir.errors import InputError
from elixir.hardware import memory as free_memory
from elixir.hardware.memory import control_groups, free_device_bytes, free_host_bytes, total_host_bytes
from elixir.units import MIB


def test_devices_that_are_not_there_are_refused() -> None:
    for device in ("tpu", "mps", "meta"):
        with pytest.raises(InputError):
            free_device_bytes(device)
    with pytest.raises(InputError, match="cuda"):
        free_device_bytes(f"cuda:{torch.cuda.device_count()}")


def test_a_system_that_does_not_tell_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> str:
        raise OSError("there is no such file, and no such number")

    monkeypatch.setattr(Path, "read_text", unknown)
    monkeypatch.setattr(os, "sysconf", unknown)
    with pytest.raises(InputError, match="does not report free memory; give the host memory"):
        free_host_bytes()
    with pytest.raises(InputError, match="does not report its memory size"):
        total_host_bytes()


def write(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(f"{content}\n")


def in_groups(monkeypatch: pytest.MonkeyPatch, root: Path, membership: Path) -> list[int]:
    """Free and total bytes of a process in these control groups."""
    monkeypatch.setattr(free_memory, "control_groups", lambda kind, *_: control_groups(kind, root, membership))
    return [free_host_bytes(), total_host_bytes()]


def test_the_page_cache_of_a_control_group_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("0::/job/step\n")
    write(
        tmp_path / "v2/job", memory__max=9 * MIB, memory__current=5 * MIB, memory__stat=f"anon 7\ninactive_file {MIB}"
    )
    write(tmp_path / "v2/job/step", memory__max="max", memory__current=3 * MIB)
    assert in_groups(monkeypatch, tmp_path / "v2", member) == [5 * MIB, 9 * MIB]


def test_the_tightest_control_group_caps_free_and_total(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("0::/job\n")
    write(tmp_path / "job", memory__max=3 * MIB, memory__current=MIB)
    write(tmp_path, memory__max=2**40, memory__current=0)
    assert in_groups(monkeypatch, tmp_path, member) == [2 * MIB, 3 * MIB]
    write(tmp_path / "job", memory__max=MIB, memory__current=2 * MIB)
    assert in_groups(monkeypatch, tmp_path, member) == [0, MIB]
