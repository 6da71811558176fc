"""`elixir.wrap` on several ranks: rank 0 plans, all decide together, and the numbers are those of DDP."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import elixir
from elixir import api
from elixir.chunk.group import Group
from elixir.errors import InputError, PlanError, RankError
from elixir.hardware import promises
from elixir.hardware.host_share import HostView
from elixir.hardware.profile import preset
from elixir.search.replan import Correction
from elixir.units import GIB
from tests.common import inside
from tests.common.ddp import LR, batch_of
from tests.common.parity import hf_loss, mixed
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


def training(rank: int, world_size: int, move: bool) -> list[str]:
    if move and rank == 0:  # the others never plan
        api.correct = lambda trace, hardware, plan, seen, optimizer: Correction(mixed(plan), f"{len(seen)} ranks")
    model = tiny("gpt2")
    inp = batch_of(model, rank, world_size)
    plain: Any = DistributedDataParallel(copy.deepcopy(model))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    memory = {"device_memory": "1200KiB", "host_budget": "1GiB"}
    module, wrapped = elixir.wrap(model, optimizer, inp=inp, hardware="cpu", device="cpu", **memory)
    before = module.plan
    for _ in range(10):
        losses = [hf_loss(module, inp), hf_loss(plain, inp)]
        assert abs(losses[0] - losses[1]) <= 1e-5 * losses[1]
        for loss, stepping in zip(losses, (wrapped, plain_optimizer), strict=True):
            loss.backward()
            stepping.step()
            stepping.zero_grad()
    assert not inside.may_replan(module)
    if move:
        assert module.plan.chunks == mixed(before).chunks
    state = module.state_dict()
    for name, value in plain.module.state_dict().items():
        limits = torch.full_like(value, 1e-3 * LR)
        if name.endswith("c_attn.bias"):  # of keys, whose gradient is rounding noise
            limits[len(limits) // 3 : 2 * len(limits) // 3] = 5e-2 * LR
        assert bool(((state[name] - value).abs() <= limits).all()), name
    module.close()
    return [module.plan.fingerprint]


def _on_a_smaller_machine(rank: int, world_size: int) -> tuple[int, list[str]]:
    said: list[str] = []
    api.logger.addFilter(lambda record: bool(said.append(record.getMessage())) or True)
    if rank == 1:
        promises.free_host_bytes = lambda: GIB
        promises.free_device_bytes = lambda device: GIB
        promises.host_view = lambda: HostView("the other one", (0,), float("inf"))
        promises.socket = SimpleNamespace(gethostname=lambda: "smaller")
    model = tiny("gpt2", layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    here = replace(preset("cpu"), host_memory_bytes=None)  # so that what is free counts
    inp = batch_of(model, rank, world_size)
    plan = elixir.api.dry_run(model, optimizer, inp=inp, device="cpu", hardware=here)
    return plan.device_budget_bytes * world_size + plan.host_budget_bytes, said


def test_a_plan_for_free_memory_is_for_the_least_of_all_machines() -> None:
    (budget, said), (same, _) = run_ranks(2, _on_a_smaller_machine)
    assert budget == same <= GIB
    assert any("smaller has 1.00 GiB of host memory free, others up to" in line for line in said), said


@pytest.mark.parametrize("move", [False, True])
def test_all_ranks_run_one_plan(move: bool) -> None:
    fingerprints = run_ranks(2, training, move)
    assert fingerprints[0] == fingerprints[1]


def refused(rank: int, world_size: int) -> None:
    model = tiny("opt")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RankError if rank else PlanError, match="needed"):
        elixir.wrap(model, optimizer, hardware="cpu", device_memory="1KiB", host_budget="1GiB")


def test_what_rank_0_cannot_plan_ends_all() -> None:
    run_ranks(2, refused)


def quiet(rank: int, world_size: int, folder: Path) -> str:
    """The text that torch writes to standard error, in C++, while a group comes and goes."""
    from torch.distributed import fsdp  # registers a backend, as tracing does

    assert fsdp
    with open(folder / str(rank), "w+b") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            group = Group()
            group.exchange("here", None)
            group.close()
        finally:
            os.dup2(before, 2)
        file.seek(0)
        return file.read().decode()


def test_torch_has_no_warning_for_groups_that_are_closed(tmp_path: Path) -> None:
    assert run_ranks(2, quiet, tmp_path) == ["", ""]


def strict(rank: int, world_size: int) -> list[str]:
    """Wraps a program that is refused, then one that is not."""
    model = tiny("gpt2")
    inp = batch_of(model, rank, world_size)

    def refused(module: Any, batch: Any) -> None:
        (hf_loss(module, batch) + module.lm_head.weight.data_ptr()).backward()

    memory = {"device_memory": "1GiB", "host_budget": "1GiB", "hardware": "cpu", "device": "cpu", "placement": "cuda"}
    said = []
    for step in (refused, None):
        try:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
            module, _ = elixir.wrap(model, optimizer, inp=inp, step_fn=step, strict=True, **memory)
            module.close()
            said.append("wrapped")
        except (InputError, RankError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_rank_0_checks_a_strict_wrap_alone_and_all_ranks_hear_of_it() -> None:
    first, second = run_ranks(2, strict)
    assert first[0].startswith("InputError: strict=True: a machine")
    assert second[0].startswith("RankError: rank 0 could not plan: strict=True: a machine")
    assert (first[1], second[1]) == ("wrapped", "wrapped")
