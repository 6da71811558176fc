"""Several ranks load, move and hold, in a step of several micro-batches, what was predicted for it, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elixir.search import optimal_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.ddp import PLANS, Twins, batch_of
from tests.common.parity import report_of
from tests.common.spawn import on_each_rank, run_ranks
from tests.common.tiny_models import tiny

COUNTED = ("loads", "host_to_device", "device_to_host", "network")


def _steps(twins: Twins, counts: tuple[int, ...]) -> None:
    """Steps of so many micro-batches."""
    for count in counts:
        for _ in range(count):
            twins.backward()
        twins.step()
        report = report_of(twins.module)
        assert (report.micro_batches, report.deviations) == (count, 0)
        assert inside.gradients(twins.module).extra_blocks == 0
        assert report.not_compared == ""
        for name in COUNTED:
            assert report.observed[name] == report.predicted[name], f"{name} of {count}"
        predicted = twins.plan.prediction_for(count)
        said = {"loads": predicted.loads, **predicted.moved_bytes}
        assert {name: report.predicted[name] for name in COUNTED[:3]} == {name: said[name] for name in COUNTED[:3]}


def _training(rank: int, world_size: int, kind: str, checkpoint: Any) -> None:
    model = tiny("gpt2", layers=1, checkpoint=checkpoint)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 4 != 1)
    twins = Twins(model, batch_of(model, rank, world_size), kind, split_number=6)
    _steps(twins, (4, 2, 1))
    if kind != "mixed":  # whose predictions are those of another plan
        assert inside.peak_bytes(twins.module, "device") <= twins.plan.predicted.device_peak_bytes
    twins.close()


@pytest.mark.parametrize("kind", PLANS)
def test_what_ranks_move_is_what_was_predicted(kind: str) -> None:
    run_ranks(2, _training, kind, "non-reentrant" if kind == "mixed" else "none")


class PartlyUsed(nn.Module):
    """A layer that the step never uses, in chunks that hold nothing else; a bias that fits into one rank's shard."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.unused = nn.Linear(300, 300, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) * self.scale.sum()


@pytest.mark.parametrize("kind", ["host", "mixed", "resident"])
@on_each_rank(2)
def test_chunks_without_a_gradient_and_shards_of_padding_count_as_they_are(
    rank: int, world_size: int, kind: str
) -> None:
    loss = lambda model, inp: model(**inp).square().mean()  # noqa: E731
    twins = Twins(PartlyUsed(), {"x": torch.ones(2, 64)}, kind, loss=loss, split_number=4, unused=True)
    _steps(twins, (4, 4))
    report = report_of(twins.module)
    assert report.observed["host_peak"] <= report.predicted["host_peak"]
    without = [own for own in inside.gradients(twins.module).by_chunk.values() if own.chunk.plan.reduce_order is None]
    assert without
    assert all(own.memory.tensor.numel() == 0 for own in without)
    twins.close()


# --- memory ---------------------------------------------------------------------------------------------------------


class ManyLayers(nn.Module):
    """Layers, the first to get a gradient being followed by one that the step never uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.norm = nn.LayerNorm(64)
        self.unused = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x).square().sum()


def steps(rank: int, world_size: int, overlap: bool) -> tuple[int, int, int]:
    model, inp = ManyLayers(), {"x": torch.ones(2, 64)}
    plan = optimal_search(
        model, world_size, inp=inp, step_fn=lambda m, i: m(**i).backward(), hardware="cpu", overlap=overlap,
        device_memory="1GiB", host_budget="1GiB", placement="cuda",
    ).plan  # fmt: skip
    assert all(chunk.resident for chunk in plan.chunks)
    module = ElixirModule(model, plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    for _ in range(2):
        module(**inp).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = report_of(module)
    found = inside.gradients(module).extra_blocks, report.observed["device_buffers"], report.predicted["device_peak"]
    module.close()
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_reductions_do_not_wait_for_a_gradient_that_never_comes(overlap: bool) -> None:
    for extra_blocks, peak_bytes, limit_bytes in run_ranks(2, steps, overlap):
        assert extra_blocks == 0
        assert peak_bytes <= limit_bytes
