"""Frozen weights in their files, on two ranks: each reads its shards, and the numbers are DDP's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elixir.errors import InputError
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common.ddp import batch_of
from tests.common.in_files import frozen_model, on_meta, plan_in_files, same, save_frozen
from tests.common.parity import hf_loss, report_of
from tests.common.spawn import run_ranks


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def training(rank: int, world_size: int, folder: Path, every: int, replicas: int = 1) -> None:
    model = frozen_model()
    inp = batch_of(model, rank, world_size)
    more = {"every": every, "replicas": replicas}, {"every": 3 - every, "replicas": replicas}
    plan, other = (plan_in_files(model, inp, world_size, **each) for each in more)
    plain = DistributedDataParallel(copy.deepcopy(model))
    plain_optimizer = adamw(plain)
    module = ElixirModule(on_meta(model), plan, device="cpu", weights=folder, strict=False, debug=Debug(poison=True))
    optimizer = ElixirOptimizer(module, adamw(module))
    for _ in range(4):
        loss, expected = hf_loss(module, inp), hf_loss(plain, inp)
        assert abs(loss.item() - expected.item()) <= 1e-5 * expected.item()
        optimizer.backward(loss)
        expected.backward()
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    report = report_of(module)
    assert report.observed["disk_read"] == report.predicted["disk_read"] > 0
    assert not report.surprises()
    state = module.state_dict()
    for name, value in plain.module.state_dict().items():
        close = torch.allclose(state[name], value, rtol=0, atol=5e-5 if name.endswith("k_proj.bias") else 1e-6)
        assert close, name
    module.rehome(other)
    assert same(module.state_dict(), state)
    module.close()
    frozen = {name: value for name, value in plain.module.named_parameters() if not value.requires_grad}
    assert all(torch.equal(model.get_parameter(name), value) for name, value in frozen.items())


def other_file(rank: int, world_size: int, folder: Path) -> None:
    """One rank's copy of a file is another one: all ranks refuse it, by name."""
    torch.manual_seed(rank)
    own = folder / str(rank)
    own.mkdir()
    model = frozen_model()
    plan: list[Plan] = [plan_in_files(model, batch_of(model, 0, world_size), world_size)]
    dist.broadcast_object_list(plan, src=0)
    if rank == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    save_frozen(model, own)
    with pytest.raises(InputError, match=r"part-0.safetensors on rank 1 and on rank 0 are not the same file"):
        ElixirModule(on_meta(model), plan[0], device="cpu", weights=own, strict=False)


@pytest.mark.parametrize("every", [1, 2], ids=["streamed", "mixed"])
def test_two_ranks_train_as_ddp(tmp_path: Path, every: int) -> None:
    save_frozen(frozen_model(), tmp_path)
    run_ranks(2, training, tmp_path, every)


@pytest.mark.slow
def test_two_replicas_train_as_ddp(tmp_path: Path) -> None:
    save_frozen(frozen_model(), tmp_path)
    run_ranks(4, training, tmp_path, 2, 2)


def test_ranks_with_other_files_refuse(tmp_path: Path) -> None:
    run_ranks(2, other_file, tmp_path)
