"""`HybridAdam` with states on a disk, without a plan: the bits of states in memory, and state dicts that have all."""

from __future__ import annotations

import copy
import errno
import os
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
