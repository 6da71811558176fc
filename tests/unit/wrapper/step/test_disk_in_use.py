"""Runs with states on a disk as users have them: planned by `wrap`, on several drives, with whatever the folder does."""

from __future__ import annotations

import copy
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir
from elixir.errors import DiskError
from elixir.files import Files
from elixir.hardware.profile import preset
from elixir.wrapper.run_options import Debug
from tests.common.early import all_early
from tests.common.on_disk import BrokenDisk, on_disk
from tests.common.parity import Pair, case, hf_loss, make_plan, report_of
from tests.common.tiny_models import FAMILIES
from tests.unit.wrapper.step.test_states_on_disk import OPTIMIZERS, run


def test_wrap_plans_for_a_disk_where_nothing_else_fits_and_trains_the_same(tmp_path: Path) -> None:
    it = case("gpt2")
    plain = copy.deepcopy(it.model)
    its_optimizer = OPTIMIZERS["AdamW"](plain)
    machine = replace(preset("cpu"), disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=1e9, disk_free_bytes=2**30)
    model, optimizer = elixir.wrap(
        it.model, OPTIMIZERS["AdamW"](it.model), inp=it.inp, hardware=machine, replan=False,
        device_memory="1600KiB", host_budget="960KiB", disk_memory="1GiB", disk_folder=tmp_path, assume="nominal",
    )  # fmt: skip
    assert model.plan.uses_disk
    for trained, stepped in ((model, optimizer), (plain, its_optimizer)):
        for _ in range(3):
            hf_loss(trained, it.inp).backward()
            stepped.step()
            stepped.zero_grad()
    report = report_of(model)
    for name in ("disk_read", "disk_write", "disk_peak"):
        assert report.observed[name] == report.predicted[name] > 0
    assert report.observed["host_peak"] <= report.predicted["host_peak"] <= 960 * 2**10
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    assert list(tmp_path.iterdir()) == []


class WatchedDisk(Files):
    """Says which folders had how many bytes written and read."""

    def __init__(self) -> None:
        self.moved: dict[tuple[str, str], int] = {}

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        result = super().call(operation, path, function, *args)
        if operation in ("read", "write"):
            key = os.path.basename(path), operation
            self.moved[key] = self.moved.get(key, 0) + result
        return result


def test_states_are_striped_over_several_drives(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    it = case("gpt2")
    disk = WatchedDisk()
    with Pair(it, on_disk(make_plan(it, "streamed")), disk_folder=folders, files=disk) as pair:
        pair.train(5)
    for way in ("read", "write"):
        parts = [disk.moved["abc"[i], way] for i in range(3)]
        assert max(parts) < 2 * min(parts), parts  # the first step has only masters, which lie on the first drive
    assert all(list(folder.iterdir()) == [] for folder in folders)


def test_one_of_several_drives_that_fails_is_named(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()

    class OneBroken(BrokenDisk):
        def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
            if path.endswith("/b"):
                return super().call(operation, path, function, *args)
            return Files.call(self, operation, path, function, *args)

    it = case("gpt2")
    disk = OneBroken(errno.EIO)
    module, optimizer = run(
        it, on_disk(make_plan(it, "streamed")), steps=1, disk_folder=folders, debug=Debug(files=disk)
    )
    module.settle()
    disk.break_it()
    optimizer.backward(module(**it.inp).loss)
    optimizer.step()
    with pytest.raises(DiskError, match=str(folders[1])) as caught:
        module.settle()
    assert caught.value.errno == errno.EIO


def test_a_folder_may_go_while_the_run_has_its_states_there(tmp_path: Path) -> None:
    """The file has no name, so only its drive matters."""
    folder = tmp_path / "states"
    folder.mkdir()
    it = case("gpt2")
    with Pair(it, on_disk(make_plan(it, "streamed")), disk_folder=folder) as pair:
        pair.train(2)
        shutil.rmtree(folder)
        pair.train(2)


class EndedDisk(Files):
    """A disk on which calls move nothing after `end`, as at the end of a device; errors have no number then."""

    def __init__(self) -> None:
        self.ended = False

    def call(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        if self.ended and operation in ("read", "write"):
            return 0
        return super().call(operation, path, function, *args)


@pytest.mark.sampled
@pytest.mark.parametrize("code", [None, errno.ENOSPC, errno.ENODEV, errno.EDQUOT])
def test_whatever_a_disk_fails_with_is_one_typed_error(code: int | None, tmp_path: Path) -> None:
    it = case("gpt2")
    disk = EndedDisk() if code is None else BrokenDisk(code, ("write",))
    plan = on_disk(make_plan(it, "streamed"))
    module, optimizer = run(it, plan, steps=1, disk_folder=tmp_path, debug=Debug(files=disk))
    module.settle()
    if isinstance(disk, EndedDisk):
        disk.ended = True
    else:
        disk.break_it()
    optimizer.backward(module(**it.inp).loss)
    optimizer.step()
    with pytest.raises(DiskError, match="chunk") as caught:
        module.settle()
    assert caught.value.errno == (code or errno.EIO)
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values() if value.is_floating_point())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "cnn", "encoder", "attention", "recurrent", "albert"])
@pytest.mark.parametrize("way", ["clipped", "new states in backward", "accumulated"])
def test_every_family_has_the_bits_of_plain_pytorch(name: str, way: str, tmp_path: Path) -> None:
    it = case(name)
    plan = make_plan(it, "streamed")
    plan = all_early(on_disk(plan, 2)) if way == "new states in backward" else on_disk(plan)
    with Pair(it, plan, disk_folder=tmp_path, max_norm=0.5 if way == "clipped" else None) as pair:
        for _ in range(3):
            for _ in range(2 if way == "accumulated" else 1):
                pair.backward()
            pair.step()
