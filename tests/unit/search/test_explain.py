"""Explanations: every number is that of planning's own models for the changed plan, and sentences follow the
numbers."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.hardware.scenario import Scenario
from elixir.models.loading import build
from elixir.models.step import default_input, default_step
from elixir.plan.chunk_plan import ChunkPlan
from elixir.plan.plan import Plan
from elixir.plan.prediction import Judgement
from elixir.search import Answer, plan_from_trace
from elixir.search.advise.answer import Effect
from elixir.search.advise.changes import Change
from elixir.search.simulator.simulation import simulate_step
from elixir.search.whatif.explanation import ChunkReasons, Difference, Elsewhere, Explanation, Spot, explain
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


HOST, DEVICE, RESIDENT = Spot("host", "host"), Spot("device", "host"), Spot("resident", "device")


def changed(change_s: float, lacks: tuple[int, int, int] = (0, 0, 0), loses: float = 0.0) -> Difference:
    """A change of a step of one second, which a search passes over if it `loses` such a share if a copy is slower."""
    judged = Judgement(Scenario(link=0.5), 1 + loses, 1.0) if loses else None
    return Difference(1 + change_s, change_s, 0, 0, 0, *lacks, 2, judged)


@pytest.mark.parametrize(
    ("changes", "elsewhere", "verdict", "effect_s"),
    [
        ([], None, "larger than a block, so there is no other place", 0.0),
        ([(DEVICE, changed(-0.001))], DEVICE, "yes", 0.001),
        ([(DEVICE, changed(-0.0011))], DEVICE, "yes: plan again", 0.0011),
        ([(DEVICE, changed(-0.5)), (RESIDENT, changed(-0.2))], DEVICE, "yes: plan again", 0.5),
        ([(DEVICE, changed(-0.5, (MIB, 0, 0))), (RESIDENT, changed(-0.2))], RESIDENT, "yes: plan again", 0.5),
        ([(DEVICE, changed(-0.5, loses=0.25)), (RESIDENT, changed(-0.2))], RESIDENT, "yes: plan again", 0.5),
        (
            [(DEVICE, changed(-0.5, loses=0.25)), (RESIDENT, changed(0.7))],
            DEVICE,
            f"would be 0.500 s faster here, but 25% slower than necessary if {Scenario(link=0.5)}",
            0.7,
        ),
        (
            [(RESIDENT, changed(0.3)), (DEVICE, changed(0.1, (MIB, 0, 3 * MIB))), (DEVICE, changed(0.1, (MIB, MIB, 0)))],
            DEVICE,
            "lacks 1.00 MiB of device memory and 3.00 MiB of disk",
            0.3,
        ),
    ],
)  # fmt: skip
def test_the_best_other_place_is_one_that_a_search_would_take(
    changes: list[tuple[Spot, Difference]], elsewhere: Spot | None, verdict: str, effect_s: float
) -> None:
    others = tuple(Elsewhere(*each) for each in changes)
    chunks = tuple(ChunkReasons(at, "a", "b", MIB, HOST, others if at != 3 else ()) for at in (0, 1, 3, 5, 7))
    slight = ChunkReasons(2, "c", "c", MIB, RESIDENT, (Elsewhere(HOST, changed(1e-5)),))
    found = Explanation(1.0, "compute", {"compute": 1.0}, (slight, *chunks), (), ())
    group, other = kinds(found) if changes else reversed(kinds(found))
    assert (group.elsewhere, group.verdict, group.effect_s) == (elsewhere, verdict, effect_s)
    there = [change.change_s for spot, change in changes if spot == elsewhere] or [0.0]
    assert (group.least_change_s, group.most_change_s) == (min(there), max(there))
    assert (group.chunks, group.parameters, group.weight_bytes) == ("0 to 1, 3, 5 and 1 runs more", "a to b", 5 * MIB)
    assert (other.chunks, other.parameters, other.spot, other.effect_s) == ("2", "c", RESIDENT, 1e-5)


def test_an_explanation_counts_early_updates_and_says_changes_in_one_unit() -> None:
    early = Difference(1.2, 0.2, 0, 0, -2 * MIB, 0, 0, 0, 2)
    blocks = (Difference(0.99, -0.0005, 0, -3 * MIB, 0, 0, MIB, 0, 1), Difference(2.0, 1.0, 0, MIB, 0, 0, 0, 0, 3))
    blocks += (Difference(1.0, 1e-7, 0, 0, 0, 0, 0, 0, 4),)
    chunks = tuple(ChunkReasons(at, "a", "b", MIB, HOST, (), early=at > 0) for at in range(3))
    gains = {"more": -0.25, "hardly more": -0.0004}
    levers = tuple(Effect(Change((), action), None, 1 + gain, gain, None) for action, gain in gains.items())
    found = Explanation(1.0, "compute", {"compute": 0.75}, chunks, blocks, levers, early)
    bound, updates, *tables = explanation_shown(found, 5)
    assert bound.startswith("1.000 s a step")
    assert bound.endswith(": 75% of the longest chain of work")
    assert updates.startswith("2 chunks are updated early, with 2.00 MiB of the host; ")
    assert updates.endswith("would change by +200.0 ms")
    shown = [list(zip(*(column.cells for column in table.columns), strict=True)) for table in tables]
    assert shown[0] == [
        ("0 to 2", "3.00 MiB", "from host / host", "-", "0", "larger than a block, so there is no other place")
    ]
    assert shown[1] == [
        ("1", "-500.0 us", "-3.00 MiB", "lacks 1.00 MiB of host memory"),
        ("3", "+1.00 s", "+1.00 MiB", "yes"),
        ("4", "0", "0", "yes"),
    ]
    assert shown[2] == [("more", "0.750 s", "-25.0%"), ("hardly more", "1.000 s", "0")]
    assert list(explanation_shown(dataclasses.replace(found, after_norm=None), 0)) == [bound]
