"""Memory of chunks that are filled: what is made for each home, and which parameters give up theirs meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.chunk import Chunk
from elixir.chunk.group import Group
from elixir.chunk.memory import Arena, Memory
from elixir.plan.plan import Plan
from elixir.wrapper.assemble.chunks import agree_on_weights, build_chunks, place_buffers
from elixir.wrapper.engine import Engine
from elixir.wrapper.run_options import RunOptions
from tests.common.made_up_runs import HOMES
from tests.common.parity import Case, make_plan, square_loss

FROZEN = len(HOMES) + 1
"""Number of the last layer, which is frozen, on the host; the one before has a weight with gaps."""


def model_of() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(FROZEN + 1)))
    model[FROZEN].requires_grad_(False)
    model[FROZEN - 1].weight = nn.Parameter(torch.ones(4, 5)[:, :4])
    return model


@cache
def plan_of(dtype: torch.dtype) -> Plan:
    """One layer in each home."""
    model = model_of()
    plan = make_plan(
        Case(model, {"input": torch.ones(2, 4)}, square_loss), "streamed", split_number=16, unified_dtype=dtype
    )
    by_layer = {chunk.parameters[0].name: chunk for chunk in plan.chunks}
    assert len(by_layer) == FROZEN + 1
    chunks = []
    for chunk in plan.chunks:
        layer = int(chunk.parameters[0].name.partition(".")[0])
        resident, weights, states = (*HOMES, HOMES[0], (False, "host", "host"))[layer]
        homes: Any = {"resident": resident, "weight_home": weights, "state_home": states}
        chunks.append(replace(chunk, **homes))
    return replace(plan, chunks=tuple(chunks), block_count=len(chunks))


def built(
    plan: Plan, folder: Path, weights: dict[str, torch.Tensor] | None = None
) -> tuple[dict[int, list[Any]], dict[int, bool]]:
    """By layer, what is made for it, and whether its parameter points into the chunk once the next one is filled."""
    made: dict[int, list[Any]] = {}
    shown: dict[int, bool] = {}
    now: list[Any] = []

    class Noted(Arena):
        def make(self, numel: int, dtype: torch.dtype, home: Any, kind: str, **how: Any) -> Memory:
            now.append((kind, home, str(dtype).removeprefix("torch."), numel, how.get("pin", True)))
            return super().make(numel, dtype, home, kind, **how)

    def noted(model: nn.Module, plan: Plan, arena: Arena, group: Group, window: Any) -> Iterator[Chunk]:
        source = agree_on_weights(group, model, weights, strict=False)
        for chunk in build_chunks(model, plan, Noted(arena.device), group, window, source=source):
            made[int(chunk.slots[0].name[0])] = list(now)
            now.clear()
            yield chunk
        # What a chunk holds has no other memory by now.
        shown.update({int(each.slots[0].name[0]): each.shows(each.slots[0]) for each in engine.chunks})

    engine = Engine(model_of(), Group(), torch.device("cpu"), RunOptions(disk_folders=(str(folder),)))
    engine.install(plan, noted)
    engine.stop()
    return made, shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_home_has_its_memory_and_own_values_are_held_once(dtype: torch.dtype, tmp_path: Path) -> None:
    rounded, name = dtype is torch.bfloat16, str(dtype).removeprefix("torch.")
    plan = plan_of(dtype)
    numel = plan.chunks[0].numel
    made, shown = built(plan, tmp_path)
    for layer, (resident, weights, states) in enumerate(HOMES):
        expected: list[Any] = []
        if states != "disk" and (rounded or weights != states):
            # New weights are copied from masters of the same dtype only.
            expected.append(("optimizer_states", states, "float32", numel, not rounded))
        kind = "resident_weights" if resident else "weights" if weights == "host" else "weight_shards"
        expected.append((kind, weights, name, numel, True))
        assert made[layer] == expected, layer
        assert shown[layer], layer
    assert made[FROZEN] == [("weights", "host", name, numel, True)]
    assert shown[FROZEN - 1]
    assert shown[FROZEN]
    _, shown = built(plan, tmp_path, {"1.weight": torch.ones(4, 4)})
    assert not any(shown.values()), "a value that is given may still be refused"


def test_buffers_are_cast_and_shared_as_before() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = shared = model[0].running_mean
    count = model[0].num_batches_tracked
    place_buffers(model, torch.device("cpu"), None)
    assert model[0].running_mean is model[1].running_mean is shared
    place_buffers(model, torch.device("cpu"), torch.bfloat16)
    assert model[0].running_mean is model[1].running_mean is not shared
    assert model[0].running_mean.dtype is model[1].running_var.dtype is torch.bfloat16
    assert model[0].num_batches_tracked is count
