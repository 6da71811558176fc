"""All that users ask apart from a plan is answered as was recorded: budgets, plans by hand, levers, sweeps, fits.

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
from elixir.errors import InputError, InputTypeError, PlanError, TraceError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.promises import Memory, Outstanding
from elixir.search import plan_from_trace
from elixir.search.advise.activations import trace_that_keeps
from elixir.search.advise.answer import ALLOWED, Answer, best_allowed
from elixir.search.budgets import disk_budget, host_memory_here, resolve_budgets, warn_if_disk_full
from elixir.search.planner import lacks_memory, least_host_bytes, least_need, packing_floors, planned, simple_plan
from elixir.search.problem.kept_trace import kept_trace
from elixir.search.problem.swapped_trace import SwappableStep, swapped_trace
from elixir.search.question import Question, StepQuestion
from elixir.search.request import SearchRequest
from elixir.search.whatif.sweep import fit, sweep
from elixir.search.whatif.sweep_row import Traces
from elixir.step_trace import StepTrace
from elixir.units import GIB
from tests.common.layered_steps import compiled_step, layered_step, some_layers
from tests.common.situations import made_up_machine, situation
from tests.common.small_searches import small_trace
from tests.unit.search import test_recorded_plans as recorded_plans
from tests.unit.search.test_recorded_plans import rounded

RECORDED = Path(__file__).with_suffix(".json")
BUDGETS = tuple(f"budgets {seed}" for seed in range(12))
BY_HAND = (*(f"hand {seed}" for seed in (1, 4, 8)), *(f"hand layers {seed}" for seed in (9, 28, 40, 62, 81, 85, 119)))
QUESTIONS = (*(f"asked {seed}" for seed in (1, 21)), *(f"asked layers {seed}" for seed in (2, 40)))
LEVERS = (*(f"levers {seed}" for seed in (11, 13, 18)), *(f"levers layers {seed}" for seed in (28, 40)))
SWEEPS = ("sweep layers 26", "sweep layers 28")
KEPT = tuple(f"kept {seed}" for seed in (0, 2, 4, 5, 7))
SURE = tuple(f"sure {seed}" for seed in (1, 2, 4, 7, 11, 23, 27, 31, 35, 38, 41, 45, 46, 50, 58))
"""No plan is nearly the fastest in all scenarios."""
NAMES = (*KEPT, *SURE, *BUDGETS, *BY_HAND, *QUESTIONS, *LEVERS, *SWEEPS)


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
        if request.pass_size == 1:
            request = replace(request, fetch=draw.choice((None, "parameters", "units")))
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


def asked_again(draw: random.Random, name: str) -> dict[str, Any]:
    """Questions around a search: needs, first looks, and the question that a plan answers."""
    trace, machine, options = situation(name)
    ranks, found = options.pop("asked"), list[Any]()
    options["activations"] = None
    for share in (1.0, 0.5, 0.02):
        less = {each: int(options[each] * share) for each in ("device_memory", "host_budget")}
        for changes in ({}, {"overlap": False}, {"placement": "cpu"}, {"search": "minimum_waste"}):
            question = Question(trace, machine, SearchRequest.of(ranks, **options | less | changes))
            need = least_need(question)
            found.append([need.device_parts, need.host_parts, lacks_memory(question), least_host_bytes(question)])
            floors = packing_floors(question)
            found.append([floors, packing_floors(question, [size for _, size in floors[:1]])])
            brief = planned(question, briefly=True)
            found.append(None if brief is None else recorded_plans.planned(brief))
            if brief is not None:
                again = Answer.of(brief, trace, machine)
                found.append([again.question.request, again.samples_per_s, again.process_need])
    return {"answers": len(found), "all": digest(rounded(found))}


def levers(draw: random.Random, name: str) -> dict[str, Any]:
    """The levers of a plan, and what may be done of all that is allowed."""
    trace, machine, options = situation(name)
    options |= {"assume": "nominal", "pass_size": 1}
    answer, said = plan_from_trace(trace, machine, options.pop("asked"), **options), list[Any]()
    machine_levers = answer.machine_levers(lambda *each: said.append(each))
    found = [[repr(each), each.options, each.step_s] for each in (*answer.levers(), *machine_levers)]
    allowed = []
    for kinds in ((), ("moments",), ("kernels", "checkpointing"), ALLOWED):
        for moments in ("float32", "8bit") if answer.question.request.optimizer_type != "SGD" else ("float32",):
            request = replace(answer.question.request, moments=moments)
            question, taken = best_allowed(answer.question._replace(request=request), kinds)
            allowed.append([question.request, taken])
    return {
        "levers": [each[0] for each in found],
        "said": said,
        "taken": [[change.action for change in taken] for _, taken in allowed],
        "all": digest(rounded([found, allowed])),
    }


def sweeps(draw: random.Random, name: str) -> dict[str, Any]:
    """The rows of a sweep, and of a fit, over machines that were made up."""
    trace, _, options = situation(name)
    for left_out in ("asked", "search", "host_budget", "disk_memory", "replicas", "frozen_weights"):
        options.pop(left_out, None)
    options |= {"assume": "nominal", "host_budget": draw.choice((None, "2GiB"))}
    machines = [
        replace(
            made_up_machine(draw),
            name=f"machine {number}",
            device_memory_bytes=trace.activation_peak_bytes + (1 + 2 * number) * trace.param_bytes + 3 * GIB,
            devices_per_host=(2, 1, 4)[number],
            network_bytes_per_s=(None, 1e9, None)[number],
            host_memory_bytes=(None, 64 * GIB, 8 * GIB)[number],
        )
        for number in range(3)
    ]
    asked, said, step = list[Any](), list[Any](), StepQuestion(dtype="bf16", seq=64)

    def made(_: Traces, model: str, batch: int, hardware: HardwareProfile, request: SearchRequest) -> StepTrace:
        asked.append([model, batch, hardware.name, request.world_size])
        if batch == 3:
            raise InputError("no such batch")
        return trace

    def progress(what: str, done: int, most: int) -> None:
        said.append([what, done, most])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traces, "get", made)
        given = options | {"device_memory": None}
        found = [
            sweep(["a", "b"], machines[:2], (1, 2, 4), (1, 3), step=step, progress=progress, **given),
            sweep(["a"], machines[:1], (4,), step=step, network_bytes_per_s=2e9, **given),
            sweep(["a"], machines[:1], step=step, **options),
            fit("a", machines, step=step, progress=progress, **given),
            fit("a", machines, step=step, counts=(4, 2, 2), **given | {"device_memory": trace.activation_peak_bytes}),
            fit("a", machines[::-1], step=step, counts=(1,), batch=2, **given),
        ]
        for call in (
            lambda: sweep(["a"], machines, batches=(3,), step=step, **given),
            lambda: sweep([], machines, step=step),
            lambda: sweep("a", machines, step=step),
            lambda: sweep(["a"], machines, (0,), step=step),
            lambda: fit("a", [], step=step),
            lambda: fit("a", machines, batch=0, step=step),
            lambda: fit("a", machines, counts=(1, 0), step=step),
            lambda: fit("a", machines, batch=3, step=step, **given),
        ):
            with pytest.raises((InputError, InputTypeError)) as caught:
                call()
            found.append(str(caught.value))  # type: ignore[arg-type]
    fits = [[row.fits for row in each] for each in found[:3]]  # type: ignore[attr-defined]
    return {"fits": fits, "asked": digest(asked), "said": [len(said), digest(said)], "all": digest(rounded(found))}


def kept(draw: random.Random, name: str) -> dict[str, Any]:
    """The activations that are chosen for layers, compiled or not, and what is traced for that."""
    made = compiled_step if draw.random() < 0.6 else layered_step
    whole = made(replace(some_layers(draw, "plain"), count=2))
    whole = replace(whole, step=replace(whole.step, checkpoint="none"))
    machine, asked, found = made_up_machine(draw), list[Any](), list[Any]()

    def traced(step: StepQuestion, *_: Any) -> StepTrace:
        asked.append(step.activations)
        return swapped_trace(kept_trace(whole, step.activations), SwappableStep(whole))

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


def sure(_: random.Random, name: str) -> dict[str, Any]:
    """Plans on machines whose host or links may be slow, for which plans between those of all scenarios are tried."""
    draw = random.Random(int(name))
    trace, machine = small_trace(draw, draw.randint(3, 6)), made_up_machine(draw)
    machine = replace(
        machine,
        device_kind="cuda",
        compute_capability=(9, 0),
        host_adam_least=draw.choice((0.2, 0.4)),
        link_least=draw.choice((0.3, 1.0)),
        early_kept=None,
        host_adam_numel_per_s=10 ** draw.uniform(8.5, 10),
        fits={},
    )
    device = int(trace.activation_peak_bytes + trace.param_bytes * draw.uniform(0.6, 5))
    accumulation, ranks = draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
    with recorded_plans.counted() as work:
        plan = plan_from_trace(
            trace, machine, ranks, device_memory=device, host_budget=2**40, accumulation=accumulation
        ).plan
    regrets = [each.regret for each in plan.predicted.judgements]
    return {"regrets": regrets, "work": work, "plan": digest(recorded_plans.planned(plan))}


WAYS = {
    "sure": sure,
    "kept": kept,
    "budgets": budgets,
    "hand": by_hand,
    "asked": asked_again,
    "levers": levers,
    "sweep": sweeps,
}


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


@pytest.mark.parametrize("name", SURE)
def test_plans_between_scenarios_are_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", BY_HAND)
def test_plans_by_hand_are_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", QUESTIONS)
def test_first_looks_are_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", LEVERS)
def test_levers_are_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_and_fits_are_as_recorded(name: str) -> None:
    check(name)


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in NAMES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
