"""Several ranks save and load one checkpoint."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.checkpoint import PerRank, load_checkpoint, save_checkpoint
from elixir.checkpoint_format.slice_reader import open_checkpoint, verify
from elixir.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound, FileError, InputError
from elixir.plan.plan import Plan
from tests.common.ddp import batch_of, plan_for
from tests.common.file_faults import FailingFiles, UnsyncedFiles
from tests.common.parity import Case, hf_loss
from tests.common.resuming import Run, differing, two_groups
from tests.common.spawn import run_ranks, run_to_end
from tests.common.tiny_models import tiny

FILES = UnsyncedFiles()


def runs(rank: int, world_size: int, kind: str, **options: Any) -> tuple[Case, Plan]:
    model = tiny("opt", dropout=0.1, layers=1)
    inp = batch_of(model, rank, world_size)
    return Case(model, inp, hf_loss), plan_for(model, inp, kind, **options)


def _resumed(rank: int, world_size: int, folder: str, kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(rank)
    it, plan = runs(rank, world_size, kind, **options)
    with Run(it, plan, two_groups(), max_norm=0.5) as run:
        run.train(3)
        saving = save_checkpoint(folder, run.state(mine=PerRank([rank]), step=3), step=3, files=FILES)
        losses = run.train(3)
        saving.wait()
        whole = run.bits() | {"losses": losses}
    torch.manual_seed(99)
    with Run(it, plan, two_groups(), max_norm=0.5) as run:
        state = run.state(mine=PerRank(None), step=0)
        loaded = load_checkpoint(folder, state, files=FILES)
        losses = run.train(3)
        assert differing(whole, run.bits() | {"losses": losses}) == []
        assert (state["step"], state["mine"].value) == (3, [rank])
        assert loaded.exact, loaded.notes
        assert loaded.world_size == world_size


@pytest.mark.parametrize(
    ("kind", "options"),
    [("mixed", {}), ("resident", {"unified_dtype": "bfloat16", "moments": "8bit"})],
)
def test_two_ranks_go_on_with_the_same_bits(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    run_ranks(2, _resumed, str(tmp_path / "run"), kind, options)
    assert verify(tmp_path / "run") == ()


class Stuck(UnsyncedFiles):
    """Removes no file of an earlier checkpoint."""

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "remove" and path.endswith(".safetensors"):
            raise FileError(errno.EIO, "Input/output error", path, operation)
        return super().call(operation, path, function, *args)


def _fails_after_its_commit(rank: int, world_size: int) -> None:
    """All have made the new checkpoint theirs by then, but no rank may take the save for done."""
    it, plan = runs(rank, world_size, "host")
    with Run(it, plan, two_groups()) as run, pytest.raises((CheckpointError, FileError), match="Input/output error"):
        save_checkpoint("run", run.state(step=9), wait=True, files=Stuck() if rank == 1 else FILES)


def _on_own_disks(rank: int, world_size: int, folder: str) -> None:
    machine = os.path.join(folder, f"machine-{rank}")
    os.mkdir(machine)
    os.chdir(machine)
    _resumed(rank, world_size, "run", "host", {})
    _fails_after_its_commit(rank, world_size)
    _resumed(rank, world_size, "run", "host", {})  # replaces the one that is there
    # A machine that lost its disk has nothing to load, and then nobody has.
    it, plan = runs(rank, world_size, "host")
    with Run(it, plan, two_groups()) as run:
        if rank == 1:
            os.remove("run/index.json")
        with pytest.raises(CheckpointNotFound):
            load_checkpoint("run", run.state(), files=FILES)
        run.train(1)


def test_every_machine_has_a_disk_of_its_own(tmp_path: Path) -> None:
    run_ranks(2, _on_own_disks, str(tmp_path))
    for rank in range(2):
        names = sorted(os.listdir(tmp_path / f"machine-{rank}" / "run"))
        assert [name.split("-", 1)[-1] for name in names if name.endswith("tensors")] == [
            f"rank-{rank:05}-of-00002.safetensors"
        ]


class Full(UnsyncedFiles):
    """No rank file gets longer than this disk allows."""

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "write" and "rank" in path:
            raise FileError(errno.ENOSPC, "No space left on device", path, operation)
        return super().call(operation, path, function, *args)


class Deadly(UnsyncedFiles):
    """This rank is gone in the middle of a write."""

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "write" and "rank" in path:
            os._exit(9)
        return super().call(operation, path, function, *args)


def _one_fails(rank: int, world_size: int, folder: str) -> str:
    it, plan = runs(rank, world_size, "host")
    with Run(it, plan, two_groups()) as run:
        run.train(1)
        save_checkpoint(folder, run.state(number=1), wait=True, files=FILES)
        saving = save_checkpoint(folder, run.state(number=2), files=Full() if rank == 1 else FILES)
        run.train(1)
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left") as raised:
            saving.wait()
        with pytest.raises(InputError, match=r"rank 1: value: a "):
            save_checkpoint(folder, run.state(value=object() if rank else 1), files=FILES)
        with pytest.raises(
            InputError, match=r"ranks save different things: rank 0 \(.*, 0, True\), rank 1 \(.*, 1, True\)"
        ):
            save_checkpoint(folder, run.state(), step=rank, files=FILES)
        run.train(1)
        load_checkpoint(folder, run.state(number=0), files=FILES)
        return f"{type(raised.value).__name__}: {raised.value}"


def test_one_rank_that_fails_fails_the_save_on_all_and_training_goes_on(tmp_path: Path) -> None:
    said = run_ranks(2, _one_fails, str(tmp_path / "run"))
    assert said[0] == said[1]
    assert verify(tmp_path / "run") == ()
    with open_checkpoint(tmp_path / "run") as saved:
        assert saved.value("number") == 1
    assert len(os.listdir(tmp_path / "run")) == 3  # nothing of the one that failed


class FragileOnOne:
    """A user's object that fails to load on one rank."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        if self.fails:
            raise KeyError("no such thing")


def _one_cannot_load(rank: int, world_size: int, folder: str) -> str:
    it, plan = runs(rank, world_size, "host")
    with Run(it, plan, two_groups()) as run:
        run.train(1)
        fragile, sizes = FragileOnOne(rank == 1), torch.zeros(3)
        save_checkpoint(f"{folder}-before", run.state(), wait=True, files=FILES)
        save_checkpoint(folder, run.state(fragile=fragile, sizes=sizes), wait=True, files=FILES)
        bits = run.bits()
        run.train(1)
        later = run.bits()
        with pytest.raises(CheckpointMismatch, match=r"rank 1: .*'sizes' has shape"):
            load_checkpoint(folder, run.state(sizes=torch.zeros(3 + rank)), files=FILES)
        with pytest.raises(InputError, match="ranks load into different things: `state` must have the same names and"):
            load_checkpoint(folder, run.state(**({"sizes": sizes} if rank else {})), files=FILES)
        with pytest.raises(CheckpointNotFound, match=r"holds no checkpoint that all ranks have: they see \[\['"):
            load_checkpoint(f"{folder}-before" if rank else folder, run.state(), files=FILES)
        assert differing(later, run.bits()) == []
        with pytest.raises(CheckpointError) as raised:
            load_checkpoint(folder, run.state(fragile=fragile), files=FILES)
        with pytest.raises(InputError, match="load a checkpoint that is whole"):
            run.step()
        fragile.fails = False
        assert load_checkpoint(folder, run.state(fragile=fragile), files=FILES).exact
        assert differing(bits, run.bits()) == []
        return str(raised.value)


def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    said = run_ranks(2, _one_cannot_load, str(tmp_path / "run"))
    assert said == 2 * ["rank 1: load_state_dict of 'fragile', a FragileOnOne, raised KeyError: 'no such thing'"]


def _one_cannot_read(rank: int, world_size: int, folder: str) -> list[str]:
    """Loads while one operation after the other fails on rank 1."""
    it, plan = runs(rank, world_size, "host")
    ends: list[str] = []
    with Run(it, plan, two_groups()) as run:
        run.train(1)
        save_checkpoint(folder, run.state(number=1), wait=True, files=FILES)
        whole = run.bits()
        run.train(1)
        before = run.bits()
        for at in range(1, 1000, 29):
            fails = FailingFiles(at, errno.EIO, only=("open", "size", "list", "read"))
            try:
                load_checkpoint(folder, run.state(number=0), files=fails if rank == 1 else FILES)
            except CheckpointError:
                pass
            else:
                return ends
            try:
                assert differing(before, run.bits()) == [], at
                ends.append("unchanged")
            except InputError:
                load_checkpoint(folder, run.state(number=0), files=FILES)
                assert differing(whole, run.bits()) == [], at
                run.train(1)
                before = run.bits()
                ends.append("waiting")
    raise AssertionError("no end")


def test_a_read_that_fails_on_one_rank_ends_alike_on_all(tmp_path: Path) -> None:
    said = run_ranks(2, _one_cannot_read, str(tmp_path / "run"))
    assert said[0] == said[1]
    assert set(said[0]) == {"unchanged", "waiting"}


def _one_dies(rank: int, world_size: int, folder: str) -> str:
    it, plan = runs(rank, world_size, "host")
    run = Run(it, plan, two_groups())
    run.train(1)
    save_checkpoint(folder, run.state(number=1), wait=True, files=FILES)
    saving = save_checkpoint(folder, run.state(number=2), files=Deadly() if rank == 1 else FILES)
    try:
        saving.wait()
    except CheckpointError as error:
        with pytest.raises(CheckpointError, match="another rank has died"):
            save_checkpoint(folder, run.state(number=3), files=FILES)
        return str(error)
    return "saved"


def test_a_rank_that_dies_in_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    survivor, dead = run_to_end(2, _one_dies, str(tmp_path / "run"), group_timeout_s=10.0, wait_s=60.0)
    assert dead.error is not None
    assert "given up" in str(survivor.result)
    assert survivor.seconds < 40
    assert verify(tmp_path / "run") == ()
    with open_checkpoint(tmp_path / "run") as saved:
        assert saved.value("number") == 1
