"""Runs with states on a disk as users have them: planned by `wrap`, on several drives, with whatever the folder does."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elixir.errors import DiskError
from elixir.files import Files
from elixir.wrapper.run_options import Debug
from tests.common.on_disk import BrokenDisk, on_disk
from tests.common.parity import case, make_plan
from tests.unit.wrapper.step.test_states_on_disk import run


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
