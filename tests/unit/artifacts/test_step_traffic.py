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
from tests.common.parity import MODES, Case, Pair, case, make_plan

COUNTED = ("loads", "hits", "host_to_device", "device_to_host", "network")


def assert_as_predicted(report: Any, plan: Plan | None = None) -> None:
    """Every count is the predicted one; with `plan`, also what the plan itself says."""
    assert report is not None
    assert report.not_compared == ""
    assert report.demand_loads == report.deviations == 0
    for name in COUNTED:
        if name != "hits":  # uses of one chunk in a row are one use to a run
            assert report.observed[name] == report.predicted[name], name
    if plan is not None:
        predicted = plan.predicted
        said = {"loads": predicted.loads, "hits": predicted.hits, **predicted.moved_bytes}
        assert {name: report.predicted[name] for name in COUNTED} == {name: said[name] for name in COUNTED}


def frozen(it: Case) -> Case:
    for number, parameter in enumerate(it.model.parameters()):
        parameter.requires_grad_(number % 3 > 0)
    return it


def kinds_of_case(name: str) -> Case:
    """gpt2 ties its embedding; opt is what the frozen ones are taken from."""
    if name == "frozen":
        return frozen(case("opt", layers=3))
    if name == "checkpointed":
        return case("opt", "non-reentrant", layers=3)
    return case(name, layers=3)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpt2", "frozen", "checkpointed"])
def test_a_step_moves_what_is_predicted_for_its_micro_batches(name: str, mode: str) -> None:
    """Whatever the plan was made for, here for one."""
    it = kinds_of_case(name)
    plan = make_plan(it, mode, allocate_factor=0.3, split_number=12)
    with Pair(it, plan) as pair:
        for micro_batches in (1, 2, 4):
            for _ in range(micro_batches):
                pair.backward()
            pair.step()
            report = pair.module.last_report
            assert_as_predicted(report)
            assert report is not None
            assert report.micro_batches == micro_batches
            predicted = plan.prediction_for(micro_batches)
            assert report.predicted["loads"] == predicted.loads
            assert report.predicted["hits"] == predicted.hits
            assert (report.predicted_step_s is None) == (micro_batches != plan.accumulation)


def search(it: Case, accumulation: int, where: str) -> Plan:
    """A plan with everything on the host, on the device, or (``auto``) in a budget for less than half of it."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        it.loss(model, inp).backward()

    memory = "560KiB" if where == "auto" else "64GiB"
    return optimal_search(
        it.model, 1, inp=it.inp, step_fn=step, hardware="cpu", host_budget="64GiB", device_memory=memory,
        placement=where, accumulation=accumulation,
    ).plan  # fmt: skip


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("accumulation", "where"), [(1, "cpu"), (2, "cpu"), (3, "auto"), (4, "cpu"), (4, "cuda")])
def test_a_searched_plan_predicts_its_own_optimizer_step(
    accumulation: int, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    it = case("opt", "non-reentrant", layers=2)
    plan = search(it, accumulation, where)
    with Pair(it, plan) as pair:
        for _ in range(2):
            for _ in range(accumulation):
                pair.backward()
            pair.step()
            assert_as_predicted(pair.module.last_report, plan)
            assert pair.module.last_report is not None
            assert not pair.module.last_report.surprises()
    assert "differs from its plan" not in caplog.text


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
