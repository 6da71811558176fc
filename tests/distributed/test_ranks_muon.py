"""Muon and AdamW on several ranks that have the same mean gradient: the bits of one process, with the bytes planned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.chunk.chunk import Chunk
from elixir.chunk.group import Group
from elixir.models.step import default_input
from elixir.plan.matrices import owners, part_of
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.ddp import PLANS, plan_for
from tests.common.on_disk import on_disk
from tests.common.parity import hf_loss, report_of
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


def optimizers(model: nn.Module, names: Any) -> list[torch.optim.Optimizer]:
    """Muon over the parameters with these names, AdamW over the others."""
    named, chosen = dict(model.named_parameters()), set(names)
    return [
        torch.optim.Muon([each for name, each in named.items() if name in chosen], lr=1e-2),
        torch.optim.AdamW([each for name, each in named.items() if name not in chosen], lr=1e-3),
    ]


def module_chunks(module: ElixirModule) -> list[Chunk]:
    """The chunks that a module runs."""
    return inside.chunks(module)


def training(rank: int, world_size: int, kinds: tuple[str, ...], folder: str, replicas: int = 1) -> None:
    for kind in kinds:
        model = tiny("llama")
        torch.manual_seed(0)
        plain, inp = copy.deepcopy(model), default_input(model, batch=2, seq=24)
        planned_for = {"optimizer_type": "Muon", "replicas": replicas}
        if kind == "disk":
            plan, more = on_disk(plan_for(model, inp, "host", **planned_for)), {"disk_folder": folder}
        else:
            plan, more = plan_for(model, inp, kind, **planned_for), {}
        theirs = optimizers(plain, plan.matrices)
        received: list[int] = []
        swap = Group.swap

        def counted(self: Group, sent: Any, got: Any, what: str) -> None:
            received.append(sum(tensor.nbytes for tensor, _ in got))  # noqa: B023 - called in this round
            swap(self, sent, got, what)  # noqa: B023

        Group.swap = counted  # type: ignore[method-assign]
        module = ElixirModule(model, plan, **more)
        mine = [ElixirOptimizer(module, each) for each in optimizers(model, plan.matrices)]
        for _ in range(3):
            hf_loss(plain, inp).backward()
            mine[0].backward(hf_loss(module, inp))
            for each in (*theirs, *mine):
                each.step()
                each.zero_grad()
        module.settle()
        Group.swap = swap  # type: ignore[method-assign]
        found = module.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), (kind, name)
        report = report_of(module)
        planned = sum(route.exchanged_bytes for route in plan.routes(rank))
        assert sum(received) == 3 * planned > 0
        links = ["network", "host_to_device", "device_to_host"]
        links += ["replicas"] * (replicas > 1) + ["disk_read"] * (kind == "disk")
        for link in links:
            assert report.observed[link] == report.predicted[link], (kind, link)
        if kind not in ("mixed", "disk"):  # whose predictions are those of other plans
            unpadded = {"device": 0, "host": 0}  # a class makes states of its parts, plans count whole shards
            for chunk, shard in zip(plan.chunks, module_chunks(module), strict=True):
                held = sum(each.numel for each in shard.held.values())
                states = plan.states_of(chunk)
                unpadded[chunk.update_home] += states.nbytes(shard.shard_numel) - states.nbytes(held)
            here, there = inside.bytes_by_kind(module, "device"), plan.predicted.device_parts
            assert here["matrix_room"] == there["matrix_room"], kind
            assert here.get("optimizer_states", 0) == there["optimizer_states"] - unpadded["device"], kind
            assert report.observed["host_peak"] == report.predicted["host_peak"] - unpadded["host"], kind
        module.close()


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (2, ("mixed", "disk")),
        pytest.param(2, PLANS, marks=pytest.mark.slow),
        pytest.param(4, (*PLANS, "disk"), marks=pytest.mark.slow),
    ],
)
def test_training_has_the_bits_of_one_process(world_size: int, kinds: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(world_size, training, kinds, str(tmp_path))


@pytest.mark.slow
def test_each_replica_makes_its_matrices_orthogonal(tmp_path: Path) -> None:
    run_ranks(4, training, (*PLANS, "disk"), str(tmp_path), 2)


def resumed(rank: int, world_size: int, folder: str, done: int, steps: int) -> None:
    """Goes on from the checkpoint after `done` steps, and saves another `steps` steps later."""
    model = tiny("llama")
    torch.manual_seed(0)
    inp = default_input(model, batch=2, seq=24)
    plan = plan_for(model, inp, "mixed", optimizer_type="Muon")
    module = ElixirModule(model, plan)
    mine = [ElixirOptimizer(module, each) for each in optimizers(model, plan.matrices)]
    state = {"model": module, "muon": mine[0], "adamw": mine[1]}
    if done:
        elixir.load_checkpoint(f"{folder}/{done}", state)
    for _ in range(steps):
        mine[0].backward(hf_loss(module, inp))
        for each in mine:
            each.step()
            each.zero_grad()
    elixir.save_checkpoint(f"{folder}/{done + steps}", state, wait=True)
    if done:
        found = module.state_dict()
        plain = tiny("llama")
        theirs = optimizers(plain, plan.matrices)
        for _ in range(done + steps):
            hf_loss(plain, inp).backward()
            for one in theirs:
                one.step()
                one.zero_grad()
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), name
        momenta = mine[0].state_dict()["state"]
        for number, state in theirs[0].state_dict()["state"].items():
            assert torch.equal(momenta[number]["momentum_buffer"], state["momentum_buffer"])
    module.close()


@pytest.mark.parametrize("runs", [((2, 0), (1, 2)), ((2, 0), (1, 2), (4, 4))])
def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path, runs: tuple[tuple[int, int], ...]) -> None:
    for world_size, done in runs:
        run_ranks(world_size, resumed, str(tmp_path), done, 2)


def test_owners_share_the_work() -> None:
    shapes = [(64, 64)] * 4 + [(176, 64)] * 3
    assert sorted(set(owners(shapes, 4))) == [0, 1, 2, 3]
    assert owners(shapes[4:], 3) == (0, 1, 2)
    parts = [part_of(100, 1000, 256, rank) for rank in range(6)]
    assert [each.stop - each.start for each in parts] == [156, 256, 256, 256, 76, 0]
