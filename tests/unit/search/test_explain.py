"""Explanations: every number is that of planning's own models for the changed plan, and sentences follow the
numbers."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.hardware.rate_fit import RateFit
from elixir.hardware.scenario import Scenario
from elixir.models.loading import build
from elixir.models.step import default_input, default_step
from elixir.plan.chunk_plan import ChunkPlan
from elixir.plan.plan import Plan
from elixir.plan.prediction import Judgement
from elixir.search import Answer, plan_from_trace, simple_search
from elixir.search.advise.changes import faster
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
from tests.common.situations import situation

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


def said(found: Explanation) -> str:
    """All sentences of an explanation."""
    texts = [text for text in explanation_shown(found, 0) if isinstance(text, str)]
    return "\n".join([*texts, *(group.verdict for group in kinds(found))])


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


def test_the_plan_has_chunks_in_several_places(plan: Plan) -> None:
    """Or the tests below would say little."""
    assert len({(chunk.resident, chunk.weight_home, chunk.state_home) for chunk in plan.chunks}) >= 2
    assert plan.block_count


def test_early_updates_and_the_step_without_them(plan: Plan, trace: StepTrace, found: Explanation) -> None:
    assert plan.has_early_updates
    assert [chunk.early for chunk in found.chunks] == [chunk.home.early for chunk in plan.chunks]
    none = dataclasses.replace(
        plan, chunks=tuple(dataclasses.replace(chunk, update="after_norm") for chunk in plan.chunks)
    )
    after = found.after_norm
    assert after is not None
    assert after.step_s == pytest.approx(simulate_step(none, trace, HARDWARE).step_s, rel=1e-9)
    assert after.change_s == pytest.approx(after.step_s - found.step_s, rel=1e-6)
    assert after.change_s > 0
    assert after.host_change_bytes == -plan.predicted.host_parts["new_states"]
    assert explanation_record(found)["after_norm"]["step_s"] == after.step_s
    count = sum(chunk.home.early for chunk in plan.chunks)
    assert f"{count} chunks are updated early" in said(found)
    assert explain(none, trace, HARDWARE, levers=False).after_norm is None


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


def test_every_other_place_that_a_search_gives_is_weighed_once(plan: Plan, found: Explanation) -> None:
    for chunk, planned in zip(found.chunks, plan.chunks, strict=True):
        spots = [chunk.spot, *(other.spot for other in chunk.elsewhere)]
        assert len(set(spots)) == len(spots)
        assert Spot("host", "device") not in spots  # no plan allows it
        assert "device" not in {
            spot.weights for spot in spots
        }  # a device of one rank has nothing to stream from itself
        streamable = planned.weight_bytes <= plan.block_bytes
        assert len(spots) == (3 if streamable else 2)
        assert (chunk.first_parameter, chunk.last_parameter) == (
            planned.parameters[0].name,
            planned.parameters[-1].name,
        )


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


def test_a_plan_with_everything_resident_can_be_explained(trace: StepTrace) -> None:
    plan = plan_from_trace(trace, HARDWARE, 1, device_memory="20GiB", host_budget="4GiB", placement="cuda").plan
    assert all(chunk.resident for chunk in plan.chunks)
    assert plan.block_bytes == 0
    found = explain(plan, trace, HARDWARE, levers=False)
    assert found.blocks == ()
    for chunk in found.chunks:
        streamed = [other.change for other in chunk.elsewhere if other.spot == Spot("host", "host")]
        assert [change.block_count for change in streamed] == [1]
        assert streamed[0].moved_change_bytes > 0


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


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("world_size", "budget", "options"),
    [
        (1, 1850, {}),
        (1, 1999, {}),
        (1, 2200, {}),
        (2, 1400, {}),
        (2, 1500, {}),
    ],
)
def test_nobody_is_told_to_plan_again_what_was_just_planned(
    trace: StepTrace, world_size: int, budget: int, options: dict[str, Any]
) -> None:
    plan = plan_from_trace(
        trace, HARDWARE, world_size, device_memory=budget * MIB, host_budget="4GiB", clipping=True, **options
    ).plan
    assert "plan again" not in said(explain(plan, trace, HARDWARE, levers=False))


@pytest.mark.slow
def test_a_badly_made_plan_is_beaten_by_planning_again(trace: StepTrace) -> None:
    plan = simple_search(
        trace, 1, split_number=12, allocate_factor=0.3, shard_device="cpu", hardware=HARDWARE, device_memory="20GiB"
    ).plan
    again = [x for x in Answer.of(plan, trace, HARDWARE).machine_levers() if x.action == "plan again, nothing changed"]
    assert again[0].change_s < 0
    # One chunk moved into free room helps as well, and the summary says so.
    assert "plan again" in said(explain(plan, trace, HARDWARE, levers=False))


def test_faster_scales_rates_and_fits_but_no_latency() -> None:
    fit = RateFit(1e-5, 2e10, 0.01)
    measured = dataclasses.replace(HARDWARE, fits={"host_to_device": fit, "host_adam": fit})
    quick = faster(measured, "host_link", 3)
    assert quick.host_to_device_bytes_per_s == 3 * HARDWARE.host_to_device_bytes_per_s
    assert (quick.fits["host_to_device"].per_s, quick.fits["host_to_device"].latency_s) == (6e10, 1e-5)
    assert quick.fits["host_adam"] == fit
    assert quick.host_adam_numel_per_s == HARDWARE.host_adam_numel_per_s
    device = faster(measured, "device")
    assert device.flops_rate("bfloat16") == 2 * HARDWARE.flops_rate("bfloat16")
    assert isinstance(device, HardwareProfile)
    peers = faster(dataclasses.replace(HARDWARE, network_bytes_per_s=1e9), "peers")
    assert peers.network_bytes_per_s == 2e9
    assert faster(HARDWARE, "peers").network_bytes_per_s is None


# -------------------------------------------------------------------------------------------------------------- report


def test_groups_hold_every_chunk_once_and_the_greatest_effect_first(found: Explanation) -> None:
    groups = kinds(found)
    numbers = [n for group in groups for first, last in group.runs for n in range(first, last + 1)]
    assert sorted(numbers) == [chunk.chunk for chunk in found.chunks]
    effects = [round(group.effect_s, 9) for group in groups]
    assert effects == sorted(effects, reverse=True)
    assert len({group.spot for group in groups}) == len(groups)


def test_what_would_be_faster_but_has_no_room_says_what_it_lacks(found: Explanation) -> None:
    shortened = [group for group in kinds(found) if group.most_change_s < -1e-3 * found.step_s]
    assert shortened
    for group in shortened:
        assert re.fullmatch(r"lacks [\d.]+ [GMK]iB of device memory", group.verdict)


@pytest.mark.parametrize(
    ("regret", "verdict"),
    [
        (None, "yes: plan again"),
        (1.09, "would be 0.012 s faster here, but 9% slower than necessary if links are slow"),
    ],
)
def test_what_fits_and_is_faster_says_why_it_was_left(found: Explanation, regret: float | None, verdict: str) -> None:
    left = None if regret is None else Judgement(Scenario(link=0.6), regret, 1.0)
    chunk = next(chunk for chunk in found.chunks if len(chunk.elsewhere) == 2)
    fits = {"lacks_device_bytes": 0, "lacks_host_bytes": 0, "lacks_disk_bytes": 0}
    change = dataclasses.replace(chunk.elsewhere[0].change, change_s=-0.012, passed_over=left, **fits)
    slower = dataclasses.replace(chunk.elsewhere[1], change=dataclasses.replace(change, change_s=0.1, passed_over=None))
    chunk = dataclasses.replace(chunk, elsewhere=(slower, dataclasses.replace(chunk.elsewhere[0], change=change)))
    (group,) = kinds(dataclasses.replace(found, chunks=(chunk,)))
    assert (group.elsewhere, group.verdict) == (chunk.elsewhere[1].spot, verdict)
    assert group.effect_s == 0.1


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


@pytest.mark.slow
def test_changes_of_the_training_are_the_levers_of_the_plan(plan: Plan, trace: StepTrace) -> None:
    """Also of a plan that comes from a file, which does not know its step."""
    back = Plan.from_json(plan.to_json())
    found = explain(back, trace, HARDWARE)
    known = {
        lever.action: lever.plan and lever.plan.predicted.step_s for lever in Answer.of(plan, trace, HARDWARE).levers()
    }
    assert {lever.action: lever.plan and lever.plan.predicted.step_s for lever in found.changes} == known
    record = {change["action"]: change for change in explanation_record(found)["changes"]}
    assert record["keep Adam's moments in 8 bits"]["options"] == {"moments": "8bit"}
    assert record["keep Adam's moments in 8 bits"]["step_s"] == known["keep Adam's moments in 8 bits"]


@pytest.mark.parametrize("name", ["layers 7", "layers 44", "layers 73"])
def test_steps_in_passes_are_explained_as_they_run(name: str) -> None:
    """Every other step is longer than the plan's own by what is said of it."""
    trace, machine, options = situation(name)
    plan = plan_from_trace(trace, machine, options.pop("asked"), **options).plan
    assert plan.pass_size > 1 or any(each.swap for each in plan.step.activations)
    found = explain(plan, trace, machine, levers=False)
    changes = [*found.blocks, *(spot.change for chunk in found.chunks for spot in chunk.elsewhere)]
    assert changes
    for change in changes:
        assert change.step_s - change.change_s == pytest.approx(plan.predicted.step_s, rel=1e-9)
