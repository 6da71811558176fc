"""Answers that no search decides are as recorded: budgets, plans by hand, and what is traced for chosen activations.

A commit that means to change an answer records it anew and says why:

    python -m tests.unit.search.test_recorded_answers
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from elixir.artifact import digest
from elixir.errors import InputError, PlanError, TraceError
from elixir.hardware.promises import Memory, Outstanding
from elixir.search.advise.activations import trace_that_keeps
from elixir.search.budgets import disk_budget, host_memory_here, resolve_budgets, warn_if_disk_full
from elixir.search.planner import simple_plan
from elixir.search.problem.activation_trace import StepUnits, kept_trace, swapped_trace
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.layered_steps import compiled_step, layered_step, some_layers, taken_piecewise
from tests.common.situations import made_up_machine, situation
from tests.unit.search import test_recorded_plans as recorded_plans
from tests.unit.search.test_recorded_plans import rounded

RECORDED = Path(__file__).with_suffix(".json")
BUDGETS = tuple(f"budgets {seed}" for seed in range(12))
BY_HAND = (*(f"hand {seed}" for seed in (1, 4, 8)), *(f"hand layers {seed}" for seed in (9, 28, 40, 62, 81, 85, 119)))
KEPT = tuple(f"kept {seed}" for seed in (0, 2, 4, 5, 7))
NAMES = (*KEPT, *BUDGETS, *BY_HAND)


def budgets(draw: random.Random, name: str) -> dict[str, Any]:
    """Budgets of machines that are here, or are not, by all that one may ask of memory."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(80):
            for level in ("info", "warning"):
                patch.setattr(f"elixir.search.budgets.logger.{level}", lambda *words: found.append(words))
            machine = replace(
                made_up_machine(draw),
                device_memory_bytes=draw.choice((GIB, 24 * GIB, 80 * GIB)),
                host_memory_bytes=draw.choice((None, 8 * GIB, 512 * GIB)),
                measured_at=draw.choice((None, "2026-01-31")),
                disk_free_bytes=draw.choice((None, 99 * GIB)),
            )
            here, promised = draw.random() < 0.5, [draw.choice((0, 0, GIB, 6 * GIB)) for _ in range(2)]
            patch.setattr("elixir.search.budgets.outstanding", lambda *_, p=promised: Outstanding(1, *p))
            if machine.device_kind == "cuda":
                patch.setattr("elixir.search.budgets.is_this_machine", lambda *_, h=here: h)
            some = lambda *sizes: draw.choice((None, None, *sizes))  # noqa: E731
            asked = {
                "device_memory": some(0, "700MiB"),
                "host": some("free", "free", "3GiB"),
                "device_reserve": some(0, "300MiB"),
                "host_reserve": some(0, "1GiB"),
                "reserve": some("100MiB"),
                "disk_memory": some(0, "99GiB", "200GiB"),
                "free": Memory(draw.choice((GIB, 40 * GIB)), draw.choice((6 * GIB, 600 * GIB))),
            }
            host = asked.pop("host")
            asked["host_memory" if host == "free" else "host_budget"] = host
            more = {"unknown_host_bytes": some(8 * GIB), "on_paper": draw.random() < 0.3}
            with_disk = replace(machine, disk_read_bytes_per_s=draw.choice((None, 1e9)))
            try:
                request = SearchRequest(world_size=draw.choice((1, 2, 16)), **asked)
                found.append([resolve_budgets(machine, request, **more), host_memory_here(machine)])
                found.append([warn_if_disk_full(machine, request.disk_memory)])
                found.append([disk_budget(with_disk, request.disk_memory)])
            except InputError as error:
                found.append(str(error))
            patch.undo()
    refused = sum(isinstance(each, str) for each in found)
    return {"refused": refused, "budgets": digest(rounded(found))}


def by_hand(draw: random.Random, name: str) -> dict[str, Any]:
    """Plans by hand, with room for them and without."""
    trace, machine, options = situation(name)
    for left_out in ("device_memory", "host_budget", "search", "disk_memory", "reserve"):
        options.pop(left_out, None)
    units = tuple(replace(unit, kind=f"{unit.kind}{at % 2}") for at, unit in enumerate(trace.units))
    trace = replace(trace, step=replace(trace.step, units=units))
    request, found = SearchRequest.of(options.pop("asked"), **options), list[Any]()
    for _ in range(8):
        if draw.choice((False, True, True)):
            trace = taken_piecewise(trace)
        memory = {
            "device_memory": draw.choice((None, None, trace.activation_peak_bytes + int(trace.param_bytes * 1.2))),
            "host_budget": draw.choice((None, None, trace.param_bytes)),
        }
        how: dict[str, Any] = {
            "split_number": draw.choice((1, 2, 3, 10)),
            "allocate_factor": draw.choice((0.2, 0.6, 1.0)),
            "shard_device": draw.choice(("cuda", "cpu")),
        }
        placement: Any = draw.choice(("auto", "auto", "cuda", "cpu"))
        try:
            plan = simple_plan(trace, machine, replace(request, placement=placement, **memory), **how)
            found.append(recorded_plans.planned(plan))
        except PlanError as error:
            found.append([*str(error).splitlines(), *map(repr, error.levers)])
    refused = sum(isinstance(each, list) for each in found)
    return {"refused": refused, "plans": digest(rounded(found))}


def kept(draw: random.Random, name: str) -> dict[str, Any]:
    """The activations that are chosen for layers, compiled or not, and what is traced for that."""
    made = compiled_step if draw.random() < 0.6 else layered_step
    whole = made(replace(some_layers(draw, "plain"), count=2))
    whole = replace(whole, step=replace(whole.step, checkpoint="none"))
    machine, asked, found = made_up_machine(draw), list[Any](), list[Any]()

    def traced(step: StepQuestion, *_: Any) -> StepTrace:
        asked.append(step.activations)
        return swapped_trace(kept_trace(whole, step.activations), StepUnits(whole))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepQuestion, "trace", traced)
        patch.setattr(StepQuestion, "build", lambda _: nn.Identity())
        for _ in range(6):
            share, pass_size = draw.choice((0.3, 0.7, 3.0)), draw.choice((1, 1, 2, "auto"))
            memory = int(share * whole.activation_peak_bytes + draw.choice((1, 10)) * whole.param_bytes)
            options: dict[str, Any] = {"accumulation": 2, "pass_size": pass_size, "activations": "auto"}
            options["placement"] = draw.choice(("auto", "auto", "cpu"))
            request = SearchRequest(world_size=1, device_memory=memory, host_budget=8 * GIB, **options)
            given = whole if draw.random() < 0.5 else "layered"
            try:
                trace = trace_that_keeps(StepQuestion(model=given), machine, request, exact=draw.random() < 0.6)
                found.append([trace.step.activations, trace.activation_peak_bytes, trace.flops])
            except (InputError, TraceError) as error:
                found.append(str(error))
            found.append([len(asked), digest(rounded(asked))])
            asked.clear()
    return {"refused": sorted({each for each in found if isinstance(each, str)}), "all": digest(rounded(found))}


WAYS = {"kept": kept, "budgets": budgets, "hand": by_hand}


def outcome(name: str) -> dict[str, Any]:
    way, _, rest = name.partition(" ")
    return rounded(WAYS[way](random.Random(name), rest))  # type: ignore[no-any-return]


def check(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_are_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", KEPT)
def test_chosen_activations_are_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", BY_HAND)
def test_plans_by_hand_are_as_recorded(name: str) -> None:
    check(name)


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in NAMES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
