"""Explanations: every number is that of planning's own models for the changed plan, and sentences follow the
numbers."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.models.loading import build
from elixir.models.step import default_input, default_step
from elixir.plan.chunk_plan import ChunkPlan
from elixir.plan.plan import Plan
from elixir.search import Answer, plan_from_trace
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import Explanation, Spot, explain
from elixir.show.explanation_tables import (
    explanation_record,
    explanation_shown,
    kinds,
    levers_table,
    places_table,
)
from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.units import MIB

HARDWARE = preset("rtx4090")


def make_trace(batch: int = 4) -> StepTrace:
    model = build("opt-125m", dtype=torch.bfloat16)
    return trace_step(
        model,
        default_input(model, batch=batch, seq=128),
        default_step,
        dtype=torch.bfloat16,
        hardware=HARDWARE,
        optimizer=None,
        model_name="opt-125m",
    )


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    return make_trace()


@pytest.fixture(scope="module")
def plan(trace: StepTrace) -> Plan:
    """Too little device memory for all, so that chunks live in several places."""
    return plan_from_trace(trace, HARDWARE, 1, device_memory=1400 * MIB, host_budget="4GiB", assume="nominal").plan


@pytest.fixture(scope="module")
def found(plan: Plan, trace: StepTrace) -> Explanation:
    return explain(plan, trace, HARDWARE, levers=False)


def with_chunk(plan: Plan, index: int, spot: Spot) -> Plan:
    """The plan with one chunk in another place, as a new plan."""
    now, stays = plan.chunks[index], spot.states == "host"
    chunk = dataclasses.replace(
        now,
        update=now.update if stays else "after_norm",
        resident=spot.weights == "resident",
        weight_home="host" if spot.weights == "host" else "device",
        state_home=spot.states if spot.states != "none" else ("host" if spot.weights == "host" else "device"),  # type: ignore[arg-type]
    )
    chunks: tuple[ChunkPlan, ...] = (*plan.chunks[:index], chunk, *plan.chunks[index + 1 :])
    return dataclasses.replace(plan, chunks=chunks)


def test_the_step_is_that_of_the_simulator(plan: Plan, trace: StepTrace, found: Explanation) -> None:
    step = simulate_step(plan, trace, HARDWARE)
    assert (found.step_s, found.bound_by) == (step.step_s, step.bound_by)
    assert sum(found.critical_s.values()) == pytest.approx(step.step_s)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_elsewhere_is_what_the_simulator_says_of_the_changed_plan(trace: StepTrace, world_size: int) -> None:
    plan = plan_from_trace(trace, HARDWARE, world_size, device_memory=1200 * MIB, host_budget="4GiB").plan
    found = explain(plan, trace, HARDWARE, levers=False)
    base_s, checked = simulate_step(plan, trace, HARDWARE).step_s, 0
    for chunk in found.chunks[::2]:
        for other in chunk.elsewhere:
            changed = dataclasses.replace(
                with_chunk(dataclasses.replace(plan, block_count=len(plan.chunks)), chunk.chunk, other.spot),
                block_count=other.change.block_count,
                # Two ranks put every chunk's gradients together in blocks; of one rank more chunks may come to do so.
                grad_block_count=plan.grad_block_count if world_size > 1 else len(plan.chunks),
            )
            step_s = simulate_step(changed, trace, HARDWARE).step_s
            # More gradient blocks than needed never make a step slower; usually they change nothing.
            assert step_s <= other.change.step_s * (1 + 1e-9)
            assert step_s == pytest.approx(other.change.step_s, rel=1e-9 if world_size > 1 else 0.02)
            assert other.change.change_s == pytest.approx(other.change.step_s - base_s, abs=1e-9)
            checked += 1
    assert checked > 10


def test_fits_means_within_the_plans_budgets(plan: Plan, found: Explanation) -> None:
    device, host = plan.predicted.device_peak_bytes, plan.predicted.host_step_bytes
    changes = [other.change for chunk in found.chunks for other in chunk.elsewhere]
    assert any(change.fits for change in changes)
    assert not all(change.fits for change in changes)
    for change in changes:
        assert change.lacks_device_bytes == max(device + change.device_change_bytes - plan.device_budget_bytes, 0)
        assert change.lacks_host_bytes == max(host + change.host_change_bytes - plan.host_budget_bytes, 0)


def test_one_block_fewer_and_one_more(plan: Plan, trace: StepTrace, found: Explanation) -> None:
    assert found.blocks
    for change in found.blocks:
        assert abs(change.block_count - plan.block_count) == 1
        changed = dataclasses.replace(plan, block_count=change.block_count)
        assert simulate_step(changed, trace, HARDWARE).step_s == pytest.approx(change.step_s, rel=1e-9)
        assert change.device_change_bytes == (change.block_count - plan.block_count) * plan.block_bytes


def test_a_trace_of_another_batch_is_refused(plan: Plan) -> None:
    """The order of use is the same, so only memory tells them apart."""
    with pytest.raises(InputError, match="same batch, sequence length"):
        explain(plan, make_trace(batch=5), HARDWARE)


# -------------------------------------------------------------------------------------------------------------- levers


def test_levers_never_lengthen_the_step_and_come_by_effect(plan: Plan, trace: StepTrace) -> None:
    now_s = simulate_step(plan, trace, HARDWARE).step_s
    levers = Answer.of(plan, trace, HARDWARE).machine_levers()
    assert [lever.change_s for lever in levers] == sorted(lever.change_s for lever in levers)
    for lever in levers:
        assert lever.step_s <= now_s
        assert lever.change_s == pytest.approx(lever.step_s - now_s)
    words = " ".join(lever.action for lever in levers)
    for expected in ("device memory of 2.73 GiB", "link to the host", "host's Adam", "compute"):
        assert expected in words
    assert "network" not in words  # one rank has none


# -------------------------------------------------------------------------------------------------------------- report


def test_tables_and_json_hold_the_same(found: Explanation) -> None:
    assert places_table(found, 1).row_count == 1 < len(kinds(found)) == places_table(found, 9).row_count
    texts = [text for text in explanation_shown(found, 0) if isinstance(text, str)]
    shown = [*explanation_shown(found, 2)]
    assert shown[: len(texts)] == texts
    places, blocks = shown[len(texts) :]
    assert not isinstance(places, str)
    assert not isinstance(blocks, str)
    assert (places.row_count, blocks.row_count) == (min(2, len(kinds(found))), len(found.blocks))
    assert levers_table(found).row_count == 0
    record = json.loads(json.dumps(explanation_record(found), allow_nan=False))
    assert len(record["chunks"]) == len(found.chunks)
    assert record["chunks"][0]["elsewhere"][0]["change_s"] == found.chunks[0].elsewhere[0].change.change_s
    assert "fits" in record["chunks"][0]["elsewhere"][0]
