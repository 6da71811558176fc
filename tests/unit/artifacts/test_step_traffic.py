"""An optimizer step of several micro-batches loads and moves what was predicted for it, to the byte."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from torch import nn

from elixir.plan.plan import Plan
from elixir.plan.step_traffic import Backwards, all_reduce_bytes
from elixir.schedule import Schedule
from elixir.search.searches import optimal_search
from tests.common.parity import Case, Pair, case, make_plan


def search(it: Case, accumulation: int, where: str) -> Plan:
    """A plan with everything on the host, on the device, or (``auto``) in a budget for less than half of it."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    memory = "560KiB" if where == "auto" else "64GiB"
    return optimal_search(
        it.model, 1, inp=it.inp, step_fn=step, hardware="cpu", host_budget="64GiB", device_memory=memory,
        placement=where, accumulation=accumulation,
    ).plan  # fmt: skip


def test_a_wrong_prediction_still_warns(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning names the number of micro-batches if it is not the planned one."""
    it = case("opt", layers=2)
    walk = Schedule.step

    def half(self: Schedule, blocks: int, micro_batches: int, held: tuple[int, ...] = ()) -> Any:
        right = walk(self, blocks, micro_batches, held)
        return dataclasses.replace(right, by_chunk={chunk: n // 2 for chunk, n in right.by_chunk.items()})

    with Pair(it, make_plan(it, "streamed")) as pair:
        monkeypatch.setattr(Schedule, "step", half)
        with caplog.at_level(logging.WARNING):
            pair.backward()
            pair.backward()
            pair.step()
    assert "differs from its plan: loads" in caplog.text
    assert "it had 2 micro-batches, planned were 1: see accumulation=" in caplog.text


def test_what_became_of_the_gradients_of_each_backward() -> None:
    """Replicas sum those from the planned number on, or all before the step."""
    for count, accumulation, partial, summed, finished in (
        (0, 1, 0, 0, False), (2, 1, 0, 2, False), (0, 3, 0, 0, False), (1, 3, 1, 0, True), (2, 3, 2, 0, True),
        (3, 3, 2, 1, False), (5, 3, 2, 3, False),
    ):  # fmt: skip
        backwards = Backwards.of(count, accumulation)
        assert backwards == Backwards(count, partial)
        assert (backwards.summed, backwards.finished) == (summed, finished)


def test_a_ring_receives_all_but_its_own_part_twice() -> None:
    assert [all_reduce_bytes(1200, ranks) for ranks in (1, 2, 3, 4, 8)] == [0, 1200, 1600, 1800, 2100]
