"""Training on several ranks, each a thread here, against one process that sees all batches: losses, norms, weights,
state dicts and checkpoints, for all homes, replicas and kinds of backwards."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint_format.slice_reader import open_checkpoint, verify
from elixir.chunk.lanes import Emulation
from elixir.errors import RankError
from elixir.plan.plan import Plan
from elixir.search import simple_search
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.audit import audit
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import mixed, report_of
from tests.common.rank_threads import on_ranks, results

WIDTH, ROWS, LR = 8, 2, 1e-2
DELAY_S = 5e-4
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda trained: torch.optim.AdamW(trained, lr=LR),
    "momentum": lambda trained: torch.optim.SGD(trained, lr=LR, momentum=0.9, weight_decay=0.1),
    "groups": lambda trained: torch.optim.RMSprop(
        [{"params": trained[::2], "lr": LR}, {"params": trained[1::2], "lr": LR / 4, "centered": True}]
    ),
}
BUILDING = threading.Lock()
"""Held by a rank that makes random values."""


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(3, affine=False))
        model[0].bias.requires_grad_(False)
        return model.to(dtype)


def batch_of(rank: int, number: int) -> torch.Tensor:
    """Another batch of each rank in each micro-batch."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch.to(next(iter(model.parameters())).dtype)).float().pow(2).mean()
    return found


def step_of(model: nn.Module, inp: dict[str, Any]) -> None:
    loss_of(model, inp["input"]).backward()


@cache
def plan_of(
    size: int, homes: str, dtype: torch.dtype, replicas: int = 1, accumulation: int = 1, **options: Any
) -> Plan:
    plan = simple_search(
        model_of(dtype).eval(), size, inp={"input": batch_of(0, 0)}, step_fn=step_of, hardware="cpu", split_number=4,
        allocate_factor=0.01, shard_device="cuda" if homes == "device" else "cpu", replicas=replicas, **options,
    ).plan  # fmt: skip
    return replace(mixed(plan) if homes == "mixed" else plan, accumulation=accumulation)


@dataclass(frozen=True)
class Situation:
    """How a run is trained."""

    size: int = 2
    homes: str = "mixed"
    dtype: torch.dtype = torch.float32
    replicas: int = 1
    accumulation: int = 1
    max_norm: float | None = None
    optimizer: str = "adamw"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def plan(self) -> Plan:
        return plan_of(self.size, self.homes, self.dtype, self.replicas, self.accumulation)


class Rank:
    """One rank of a run."""

    def __init__(self, it: Situation, rank: int, plan: Plan | None = None) -> None:
        self.it, self.rank = it, rank
        # Work on each lane is held back for a while: what does not wait for it shows.
        debug = Debug(poison=True, emulation=Emulation(delay_s=DELAY_S, seed=rank))
        model = model_of(it.dtype).eval()
        self.module = ElixirModule(model, plan or it.plan, device="cpu", debug=debug, **dict(it.options))
        trained = [each for each in self.module.parameters() if each.requires_grad]
        self.optimizer = ElixirOptimizer(self.module, OPTIMIZERS[it.optimizer](trained), max_norm=it.max_norm)
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        for micro in range(self.it.accumulation):
            loss = loss_of(self.module, batch_of(self.rank, number * self.it.accumulation + micro))
            self.losses.append(loss.item())
            self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in self.module.state_dict().items()}


def plain(it: Situation, steps: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by rank, and the weights, of one process that takes the mean over all batches of a step."""
    model = model_of(it.dtype).eval()
    wide = copy.deepcopy(model).float()
    trained = [
        (one, other) for one, other in zip(model.parameters(), wide.parameters(), strict=True) if one.requires_grad
    ]
    optimizer = OPTIMIZERS[it.optimizer]([each for _, each in trained])
    losses: list[list[float]] = [[] for _ in range(it.size)]
    for number in range(steps):
        for rank, micro in itertools.product(range(it.size), range(it.accumulation)):
            loss = loss_of(model, batch_of(rank, number * it.accumulation + micro))
            losses[rank].append(loss.item())
            (loss / it.size).backward()
        for one, other in trained:
            other.grad, one.grad = one.grad.float() if one.grad is not None else None, None
        if it.max_norm:
            nn.utils.clip_grad_norm_([each for _, each in trained], it.max_norm)
        optimizer.step()
        with torch.no_grad():
            for one, other in trained:
                one.copy_(other)
    return losses, dict(model.state_dict())


SITUATIONS = {
    "one rank": Situation(size=1),
    "one rank, clipped, accumulated": Situation(size=1, homes="host", accumulation=2, max_norm=0.05),
    "one rank, momentum": Situation(size=1, optimizer="momentum"),
    "one rank, groups, clipped": Situation(size=1, optimizer="groups", max_norm=0.05),
    "momentum": Situation(optimizer="momentum"),
    "groups, accumulated": Situation(optimizer="groups", accumulation=2),
    "host": Situation(homes="host"),
    "device": Situation(homes="device"),
    "three ranks": Situation(size=3),
    "clipped": Situation(max_norm=0.05),
    "accumulated": Situation(accumulation=2),
    "accumulated on the host, clipped": Situation(homes="host", accumulation=2, max_norm=0.05),
    "replicas": Situation(size=4, replicas=2, homes="host"),
    "replicas of two, accumulated, clipped": Situation(size=4, replicas=2, accumulation=2, max_norm=0.05),
    "sums in float32": Situation(options=(("reduce_always_fp32", True),)),
    "without prefetch": Situation(homes="host", options=(("prefetch", False),)),
    "low precision": Situation(dtype=torch.bfloat16, options=(("reduce_always_fp32", True),)),
}
STEPS = 3


def host_bytes(plan: Plan) -> int:
    """One rank's weights, gradients, two states and masters in float32 on the host."""
    found = 0
    for chunk in plan.chunks:
        shard_bytes = 4 * chunk.numel // plan.shards
        found += shard_bytes * (chunk.weight_home == "host")
        if chunk.trainable and chunk.state_home == "host":
            found += shard_bytes * (1 + 2 + (chunk.weight_home == "device"))
    return found


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", SITUATIONS)
def test_ranks_train_as_one_process_that_sees_all_batches(name: str) -> None:
    it = SITUATIONS[name]
    losses, weights = plain(it, STEPS)
    plan = it.plan
    exact = it.dtype == torch.float32

    def work(rank: int) -> None:
        run = Rank(it, rank)
        for number in range(STEPS):
            run.step(number)
        assert run.losses == pytest.approx(losses[rank], rel=1e-4 if exact else 0.05)
        audit(run.module)
        report = report_of(run.module)
        for key, expected in report.predicted.items():
            if key in ("loads", "host_to_device", "device_to_host", "network", "replicas") and not report.not_compared:
                assert report.observed[key] == expected, key
        assert (report.deviations, report.demand_loads, report.micro_batches) == (0, 0, it.accumulation)
        if exact:
            assert report.predicted["host_peak"] == host_bytes(plan)
        assert report.observed["host_peak"] <= report.predicted["host_peak"]
        found = run.weights()
        for key, expected in weights.items():
            torch.testing.assert_close(
                found[key], expected, rtol=1e-4 if exact else 0.05, atol=1e-5 if exact else 5e-3, check_dtype=False
            )
        model = run.module.release()
        for key, expected in model.state_dict().items():
            assert torch.equal(expected, found[key].to(expected.dtype)), key

    assert plan.world_size == it.size
    results(it.size, work)


@pytest.mark.parametrize(("size", "replicas", "then"), [(2, 1, 1), (1, 1, 3), (2, 1, 2), (4, 2, 2)])
def test_a_checkpoint_goes_on_with_other_ranks(tmp_path: Path, size: int, replicas: int, then: int) -> None:
    """Two steps, a save, and two more steps of the same batches, on as many ranks and on others."""
    it, files = Situation(size=size, replicas=replicas), UnsyncedFiles()

    def train(rank: int) -> dict[str, torch.Tensor]:
        run = Rank(it, rank)
        for number in range(2):
            run.step(number)
        state = {"model": run.module, "optimizer": run.optimizer, "epoch": 3}
        saving = save_checkpoint(tmp_path / "run", state, step=2, files=files)
        before = run.weights()
        run.step(2)  # while it is written
        saved = saving.wait()
        assert (saved.step, saved.world_size) == (2, size)
        run.module.close()
        return before

    before = results(size, train)
    assert verify(tmp_path / "run") == ()
    with open_checkpoint(tmp_path / "run") as saved:
        assert saved.step == 2
        for name, value in saved.weights().items():
            assert torch.equal(value, before[0][name]), name
        assert {each["step"].item() for each in saved.optimizer_state_dict()["state"].values()} == {2.0}
    other = Situation(size=then)

    def go_on(rank: int) -> None:
        run = Rank(other, rank)
        state: dict[str, Any] = {"model": run.module, "optimizer": run.optimizer, "epoch": 0}
        loaded = load_checkpoint(tmp_path / "run", state, files=files)
        assert (state["epoch"], loaded.step, loaded.world_size) == (3, 2, size)
        assert bool(loaded.notes) == (then != size), "random numbers are those of each rank"
        for name, value in run.weights().items():
            assert torch.equal(value, before[0][name]), name
        again = save_checkpoint(tmp_path / "again", state, files=files)
        run.step(2)
        again.wait()
        run.module.close()

    results(then, go_on)
    with open_checkpoint(tmp_path / "run") as one, open_checkpoint(tmp_path / "again") as two:
        keys = [{key for key in each.keys() if not key.startswith("value/rng")} for each in (one, two)]  # noqa: SIM118
        assert keys[0] == keys[1]
        assert all(torch.equal(one.read_whole(key), two.read_whole(key)) for key in keys[0])
        assert one.index.steps == two.index.steps


@pytest.mark.parametrize("way", ["clears gradients", "clears those of the module", "steps not"])
def test_a_rank_that_does_something_else_is_told_with_the_others(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.limit(monkeypatch, look_s=0.05)

    def work(rank: int) -> None:
        run = Rank(Situation(), rank)
        run.step(0)
        if rank and way == "clears gradients":
            run.optimizer.zero_grad()
        if rank and way == "clears those of the module":
            run.module.zero_grad()
        run.optimizer.backward(loss_of(run.module, batch_of(rank, 1)))
        if way != "steps not" or not rank:
            run.optimizer.step()
        run.step(2)

    found = on_ranks(2, work)
    assert all(isinstance(each, RankError) for each in found), found
    assert all("the ranks no longer do the same" in str(each) for each in found)
