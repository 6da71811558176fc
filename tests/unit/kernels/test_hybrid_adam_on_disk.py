"""`HybridAdam` with states on a disk, without a plan: the bits of states in memory, and state dicts that have all."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import DiskError, InputError, InputTypeError
from elixir.kernels import HybridAdam


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((300, 70), (257,), (), (64, 3, 3, 3), (1000, 80))
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(mine: list[nn.Parameter], optimizer: HybridAdam, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for index, parameter in enumerate(mine):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if (step + index) % 5 == 4 else gradient
        optimizer.step()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("dtype", "moments"), [(torch.float32, "float32"), (torch.bfloat16, "8bit"), (torch.bfloat16, "bfloat16")]
)
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_same_bits_as_in_memory(dtype: torch.dtype, moments: str, fraction: float, tmp_path: Path) -> None:
    on_disk, in_memory = parameters(dtype), parameters(dtype)
    optimizer = HybridAdam(
        on_disk, moments=moments, nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path, weight_decay=0.1
    )
    twin = HybridAdam(in_memory, moments=moments, weight_decay=0.1)
    for mine, each in ((on_disk, optimizer), (in_memory, twin)):
        train(mine, each, 4)
    assert all(map(torch.equal, on_disk, in_memory))
    states: tuple[dict[str, Any], ...] = (optimizer.state_dict(), twin.state_dict())
    for number, state in states[1]["state"].items():
        for name, value in state.items():
            assert torch.equal(states[0]["state"][number][name], value), (number, name)
    fresh = parameters(dtype)
    with torch.no_grad():
        for parameter, value in zip(fresh, in_memory, strict=True):
            parameter.copy_(value)
    other = HybridAdam(
        fresh, moments=moments, nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path, weight_decay=0.1
    )
    other.load_state_dict(states[0])
    for mine, each in ((fresh, other), (in_memory, twin)):
        train(mine, each, 2, seed=5)
    assert all(map(torch.equal, fresh, in_memory))
    assert list(tmp_path.iterdir()) == []


def test_states_on_the_disk_take_no_memory_between_steps(tmp_path: Path) -> None:
    mine = parameters(torch.float32)
    optimizer = HybridAdam(mine, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    train(mine, optimizer, 1)
    kept = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert kept
    assert all(value.untyped_storage().nbytes() <= 4 for value in kept)


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nvme_offload_dir"):
        HybridAdam(parameters(torch.float32), nvme_offload_fraction=0.5)
    with pytest.raises(InputTypeError, match="nvme_offload_fraction must be a number, got 'half'"):
        HybridAdam(parameters(torch.float32), nvme_offload_fraction="half", nvme_offload_dir=".")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="from 0 to 1"):
        HybridAdam(parameters(torch.float32), nvme_offload_fraction=1.5, nvme_offload_dir=tmp_path)


def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = parameters(torch.float32)
    optimizer = HybridAdam(mine, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    train(mine, optimizer, 1)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(DiskError, match="HybridAdam"):
        train(mine, optimizer, 1)
    with pytest.raises(DiskError, match="HybridAdam"):  # what is on the disk is neither old nor new
        optimizer.state_dict()
    monkeypatch.undo()
    before = copy.deepcopy([parameter.detach() for parameter in mine])
    with pytest.raises(DiskError):
        train(mine, optimizer, 1)
    assert all(map(torch.equal, mine, before))
    twin = HybridAdam(other := parameters(torch.float32))
    train(other, twin, 2)
    with torch.no_grad():
        for parameter, value in zip(mine, other, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(twin.state_dict())
    train(mine, optimizer, 1)
    train(other, twin, 1)
    assert all(map(torch.equal, mine, other))


def test_a_disk_that_is_full_while_states_are_loaded_gives_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = parameters(torch.float32), parameters(torch.float32)
    twin = HybridAdam(other)
    train(other, twin, 2)
    optimizer = HybridAdam(mine, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    train(mine, optimizer, 1)
    calls, write = [0], os.pwrite

    def second_fails(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", second_fails)
        with pytest.raises(DiskError, match="No space left"):
            optimizer.load_state_dict(twin.state_dict())
    for asked in (optimizer.state_dict, lambda: train(mine, optimizer, 1)):
        with pytest.raises(DiskError, match="No space left"):
            asked()


def test_a_state_dict_without_states_begins_anew(tmp_path: Path) -> None:
    on_disk, in_memory = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizers = (
        HybridAdam(on_disk, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path),
        HybridAdam(in_memory),
    )
    for mine, optimizer in zip((on_disk, in_memory), optimizers, strict=True):
        fresh = copy.deepcopy(optimizer.state_dict())
        train(mine, optimizer, 2)
        optimizer.load_state_dict(fresh)
        train(mine, optimizer, 2)
    assert all(map(torch.equal, on_disk, in_memory))


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), saved_and_loaded])
def test_a_copy_is_whole(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    mine = parameters(torch.bfloat16)
    optimizer = HybridAdam(mine, moments="8bit", nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    train(mine, optimizer, 2)
    theirs, other = copied((mine, optimizer))
    train(mine, optimizer, 2)
    train(theirs, other, 2)
    assert all(map(torch.equal, mine, theirs))


def test_a_step_that_raises_leaves_all_states(tmp_path: Path) -> None:
    on_disk, in_memory = parameters(torch.float32), parameters(torch.float32)
    optimizers = (
        HybridAdam(on_disk[::-1], nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path),
        HybridAdam(in_memory[::-1]),
    )
    for mine, optimizer in zip((on_disk, in_memory), optimizers, strict=True):
        train(mine, optimizer, 2)
        for parameter in mine:
            parameter.grad = None
        mine[4].grad = torch.ones_like(mine[4])  # the first, and too large to be stepped with others
        mine[1].grad = torch.ones(257).to_sparse()
        with pytest.raises(InputError, match="dense gradients"):
            optimizer.step()
        train(mine, optimizer, 2)
    assert all(map(torch.equal, on_disk, in_memory))


def test_states_that_are_replaced_go_to_the_disk(tmp_path: Path) -> None:
    on_disk, in_memory = parameters(torch.float32), parameters(torch.float32)
    optimizers = (
        HybridAdam(on_disk, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path),
        HybridAdam(in_memory),
    )
    for mine, optimizer in zip((on_disk, in_memory), optimizers, strict=True):
        train(mine, optimizer, 2)
        optimizer.state[mine[0]] = {
            "step": torch.tensor(1.0),
            "exp_avg_sq": torch.ones_like(mine[0]),
            "exp_avg": torch.full_like(mine[0], 0.1),
        }
        optimizer.state[mine[1]].clear()
        train(mine, optimizer, 2)
    assert all(map(torch.equal, on_disk, in_memory))
    assert all(value.untyped_storage().nbytes() <= 4 for value in optimizers[0].state[on_disk[0]].values())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files of a process are counted by /proc")
def test_a_dropped_optimizer_gives_its_file_back(tmp_path: Path) -> None:
    def held() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [str(link.readlink()) for link in links if str(link.readlink()).startswith(str(tmp_path))]

    mine = parameters(torch.float32)
    optimizer = HybridAdam(mine, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    train(mine, optimizer, 1)
    assert len(held()) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(held()) == 1
    del optimizer
    gc.collect()
    assert held() == []
