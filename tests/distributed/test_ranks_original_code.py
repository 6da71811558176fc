"""Both programs of the first Elixir's README, on several ranks that each search with the free memory that they read."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.models.step import default_input
from elixir.search import budgets, minimum_waste_search, optimal_search
from elixir.units import GIB, MIB
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.ddp import batch_of
from tests.common.parity import hf_loss
from tests.common.spawn import on_each_rank, run_ranks
from tests.common.tiny_models import tiny

Result = tuple[str, list[float], list[str]]
"""The plan at work, losses, and lines of the log."""


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("elixir").addHandler(self)
        logging.getLogger("elixir").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def read_as_free(nbytes: int) -> None:
    budgets.free_host_bytes = lambda: nbytes  # type: ignore[assignment]


def trained(model: ElixirModule, optimizer: ElixirOptimizer, data: dict[str, Any]) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**data).loss
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def simple(rank: int, world_size: int) -> Result:
    from transformers import BertConfig, BertForSequenceClassification

    read_as_free(8 * GIB - rank * MIB)
    lines = Lines().lines
    world_group = dist.group.WORLD
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = BertForSequenceClassification(BertConfig(vocab_size=64, **size, **no_dropout))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-8)

    sr = minimum_waste_search(model, world_size)
    data = {name: value[:2] for name, value in default_input(model).items()}
    model = ElixirModule(model, sr, world_group)
    optimizer = ElixirOptimizer(model, optimizer)
    losses = trained(model, optimizer, data)
    model.close()
    return model.plan.fingerprint, losses, lines


def advanced(rank: int, world_size: int) -> Result:
    from elixir import HybridAdam

    read_as_free(8 * GIB - rank * MIB)
    lines = Lines().lines
    global_group = dist.GroupMember.WORLD
    global_size = dist.get_world_size()

    def train_step(model: nn.Module, inp: dict[str, Any]) -> None:
        hf_loss(model, inp).backward()

    model: nn.Module = tiny("opt", layers=1)
    data = batch_of(model, rank, world_size)
    optimizer: Any = HybridAdam(model.parameters(), lr=1e-3)

    sr = optimal_search(
        model, global_size, unified_dtype=torch.float16, overlap=True, verbose=True, inp=data, step_fn=train_step
    )
    model = ElixirModule(model, sr, global_group, prefetch=True, dtype=torch.float16, use_fused_kernels=True)
    optimizer = ElixirOptimizer(model, optimizer, initial_scale=64, init_step=True)
    losses = trained(model, optimizer, data)
    model.close()
    return model.plan.fingerprint, losses, lines


@pytest.mark.parametrize("program", [simple, advanced])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_printed_code_runs(program: Any, world_size: int) -> None:
    results: list[Result] = run_ranks(world_size, program)
    assert len({plan for plan, _, _ in results}) == 1
    for _, losses, _ in results:
        assert losses[-1] < losses[0]
    said = [line for _, _, lines in results for line in lines]
    assert sum("no host memory given" in line for line in said) == 1
    assert sum("ranks have read different free memory" in line for line in said) == (world_size > 1)


def wrapped_with(
    rank: int, world_size: int, free: list[int], options: list[dict[str, Any]], *, layers: int = 2
) -> tuple[str, str]:
    """(the plan that was found here, the plan at work), on a CPU with so much free memory for each rank."""
    read_as_free(free[rank])
    model = tiny("opt", layers=layers)
    machine = replace(preset("cpu"), host_memory_bytes=None)
    batch = batch_of(model, rank, world_size)
    plan = optimal_search(model, world_size, inp=batch, hardware=machine, placement="cuda", **options[rank]).plan
    wrapped = ElixirModule(model, plan)
    losses = trained(wrapped, ElixirOptimizer(wrapped, torch.optim.AdamW(wrapped.parameters())), batch)
    assert losses[-1] < losses[0]
    wrapped.close()
    return plan.fingerprint, wrapped.plan.fingerprint


def agreeing(rank: int, world_size: int, free: list[int]) -> list[tuple[str, str]]:
    turned = [free[-1], *free[:-1]]
    return [wrapped_with(rank, world_size, each, [{}] * world_size) for each in (free, turned)]


def test_the_first_plan_that_fits_all_is_taken() -> None:
    """It is the one that was made for the least memory, whichever rank has made it."""
    results = run_ranks(2, agreeing, [GIB, 8 * MIB])
    for case, least in ((0, 1), (1, 0)):
        found = [result[case][0] for result in results]
        assert len(set(found)) == 2
        assert [result[case][1] for result in results] == [found[least]] * 2


DIFFERENT = {
    r"clipping \(False, on rank 0 True\)": ({"clipping": True}, {"clipping": False}),
    "host_budget_bytes": ({"host_budget": "64MiB"}, {"host_budget": "128MiB"}),
    "read_budgets": ({"host_budget": "64MiB"}, {}),
}
"""Cause of two plans -> what their ranks asked for."""


@on_each_rank(2)
def test_plans_that_differ_for_another_reason_are_refused(rank: int, world_size: int) -> None:
    for cause, options in DIFFERENT.items():
        with pytest.raises(InputError, match=f"rank 1 has plan .*{cause}.*broadcast_object_list"):
            wrapped_with(rank, world_size, [GIB, GIB // 2], list(options), layers=1)


@on_each_rank(2)
def test_ranks_none_of_whose_plans_fits_all_are_told_what_does(rank: int, world_size: int) -> None:
    """The device of one rank has less free memory than the other's plan needs, and the host of the other."""
    read_as_free(GIB)
    model = tiny("opt", layers=1)
    machine = replace(preset("cpu"), host_memory_bytes=None)
    batch = batch_of(model, rank, world_size)
    plan = optimal_search(model, world_size, inp=batch, hardware=machine, placement="cuda").plan
    peaks = {"device": plan.predicted.device_peak_bytes, "host": plan.predicted.host_peak_bytes}
    short = replace(plan, **{f"{('device', 'host')[rank]}_budget_bytes": peaks[("device", "host")[rank]] - 1})
    with pytest.raises(InputError, match=r"no rank's plan fits .* device_memory=\d+ \(.*\) and host_budget=\d+ \("):
        ElixirModule(model, short)
    wrapped = ElixirModule(model, plan)
    wrapped.close()
