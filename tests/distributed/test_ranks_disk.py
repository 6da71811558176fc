"""States on a disk, on several ranks: the bits of states in memory, and a disk that fails stops all ranks alike."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elixir
from elixir.errors import DiskError, ElixirError, InputError, RankError
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common.ddp import batch_of, plan_for
from tests.common.on_disk import BrokenDisk, ShortDisk, in_memory, on_disk
from tests.common.parity import hf_loss, report_of
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


def started(
    rank: int, world_size: int, plan: Plan, folder: Path, disk: BrokenDisk
) -> tuple[ElixirModule, ElixirOptimizer]:
    model = tiny("opt")
    module = ElixirModule(model, plan, device="cpu", disk_folder=folder, debug=Debug(poison=True, files=disk))
    return module, ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-2), max_norm=1.0)


def step(rank: int, world_size: int, module: ElixirModule, optimizer: ElixirOptimizer) -> None:
    optimizer.backward(hf_loss(module, batch_of(tiny("opt"), rank, world_size)))
    optimizer.step()
    optimizer.zero_grad()


def training(rank: int, world_size: int, folder: Path) -> None:
    model = tiny("opt")
    plan = plan_for(model, batch_of(model, rank, world_size), "host", unified_dtype=torch.bfloat16)
    found = []
    for homes in (in_memory(plan), on_disk(plan)):
        module, optimizer = started(rank, world_size, homes, folder, BrokenDisk(errno.EIO))
        for _ in range(3):
            step(rank, world_size, module, optimizer)
        found.append((module.state_dict(), optimizer.state_dict()["state"]))
        report = report_of(module)
        if homes.uses_disk:
            assert report.observed["disk_read"] == report.predicted["disk_read"]
        module.close()
    (weights, states), (its_weights, its_states) = found
    assert all(torch.equal(weights[name], its_weights[name]) for name in weights)
    for number, state in states.items():
        assert all(torch.equal(value, its_states[number][kind]) for kind, value in state.items())


DISKS: dict[str, Callable[[], Any]] = {
    "EIO": lambda: BrokenDisk(errno.EIO),
    "full": lambda: BrokenDisk(errno.ENOSPC, ("write",)),
    "gone": lambda: BrokenDisk(errno.ENODEV),
    "short": ShortDisk,
}
"""Errors of every transfer, or of writes; the drive is no more there; writes are cut short and then move nothing."""


def failing(rank: int, world_size: int, folder: Path, how: str) -> None:
    """The disk of rank 1 fails: each rank is told in its next step, and all still give weights, and save them."""
    model = tiny("opt")
    plan = on_disk(plan_for(model, batch_of(model, rank, world_size), "host", unified_dtype=torch.bfloat16))
    disk = DISKS[how]()
    module, optimizer = started(rank, world_size, plan, folder, disk)
    step(rank, world_size, module, optimizer)
    module.settle()
    if rank == 1:
        disk.break_it()
    step(rank, world_size, module, optimizer)
    with pytest.raises(DiskError if rank == 1 else RankError, match="rank 1's chunk") as caught:
        step(rank, world_size, module, optimizer)
    if isinstance(caught.value, DiskError):
        assert caught.value.errno == {"full": errno.ENOSPC, "gone": errno.ENODEV}.get(how, errno.EIO)
    for _ in range(2):  # it stays lost, on all ranks alike
        with pytest.raises(DiskError if rank == 1 else RankError, match="rank 1's chunk"):
            step(rank, world_size, module, optimizer)
    state = module.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    optimizer.zero_grad()
    with pytest.raises(ElixirError, match="rank 1's chunk"):
        elixir.save_checkpoint(folder.parent / "whole", {"model": module, "optimizer": optimizer}, wait=True)
    with pytest.raises(DiskError if rank == 1 else RankError, match="rank 1's chunk"):
        module.close()
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


def without_folder(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 has no such folder: nobody has a module, and all can have one elsewhere."""
    model = tiny("opt")
    plan = on_disk(plan_for(model, batch_of(model, rank, world_size), "host", unified_dtype=torch.bfloat16))
    absent = folder / "absent" if rank == 1 else folder
    with pytest.raises(InputError, match="is no folder"):
        started(rank, world_size, plan, absent, BrokenDisk(errno.EIO))
    module, optimizer = started(rank, world_size, plan, folder, BrokenDisk(errno.EIO))
    step(rank, world_size, module, optimizer)
    module.close()


def full(rank: int, world_size: int, folder: Path) -> None:
    """The disk of rank 1 has no room: nobody has a module, and a smaller plan works afterwards."""
    model = tiny("opt")
    plan = plan_for(model, batch_of(model, rank, world_size), "host", unified_dtype=torch.bfloat16)
    disk = BrokenDisk(errno.ENOSPC, ("allocate",), at=2 if rank == 1 else None)
    with pytest.raises(DiskError if rank == 1 else RankError, match="No space left"):
        started(rank, world_size, on_disk(plan), folder, disk)
    module, optimizer = started(rank, world_size, in_memory(plan), folder, BrokenDisk(errno.EIO))
    step(rank, world_size, module, optimizer)
    module.close()


def a_folder_goes(rank: int, world_size: int, folder: Path) -> None:
    """Away from under both ranks: their files are open, and training goes on, to the same bits."""
    model = tiny("opt")
    plan = plan_for(model, batch_of(model, rank, world_size), "host", unified_dtype=torch.bfloat16)
    found = []
    for homes in (in_memory(plan), on_disk(plan)):
        module, optimizer = started(rank, world_size, homes, folder, BrokenDisk(errno.EIO))
        step(rank, world_size, module, optimizer)
        module.settle()
        if homes.uses_disk:
            dist.barrier()  # both have their files
            if rank == 0:
                folder.rmdir()
            dist.barrier()
            assert not folder.exists()
        step(rank, world_size, module, optimizer)
        found.append(module.state_dict())
        module.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("what", "more"),
    [
        (training, []),
        *((failing, [how]) for how in DISKS),
        (full, []),
        (without_folder, []),
        (a_folder_goes, []),
    ],
)
def test_states_on_a_disk(what: Callable[..., None], more: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "drive"
    folder.mkdir()
    run_ranks(2, what, folder, *more)
    assert not folder.exists() or list(folder.iterdir()) == []
