"""One HTML file of a plan, of two, of a trace or of a run: opens without a server, loads nothing, and has all numbers
inside of it. Apache ECharts draws it (`elixir/show/html`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from elixir.artifact import write_atomically
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.scenario import Scenario
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.search.advise.answer import Effect
from elixir.search.simulator.simulation import Simulation, simulate_step
from elixir.search.whatif.explanation import Explanation
from elixir.show.explanation_tables import fits_text
from elixir.show.memory_curve import STACK, curve_positions, phase_runs
from elixir.show.plan_map import HOME_COLOURS, order_of_use, part_colours
from elixir.show.style import GREY, PALE, RESOURCE_LABELS, part_label
from elixir.show.tables import Row, flags_of, show_value
from elixir.show.timeline import LANE_ORDER, SPAN_COLOURS, device_memory, entries_over_step, modules_over_step
from elixir.step_trace import StepTrace, peak_holders
from elixir.units import format_bytes, format_seconds

View = dict[str, Any]
"""The content of one column of the page; `elixir/show/html/page.js` draws each key that is there."""
_TICKS = 100_000
"""Moments of a step that the page tells apart."""
_PARTS = {
    "activations": "what forward keeps for backward, inputs and the workspace of libraries",
    "buffers": "buffers of the model, such as running means",
    "rcache": "blocks through which streamed weights pass",
    "resident_weights": "weights that are gathered on the device for the whole step",
    "weight_shards": "this rank's part of weights that are gathered when they are used",
    "weights": "weights that live here and are streamed to the device",
    "optimizer_states": "master weights in float32 and moments",
    "gradients": "gradients that wait for the optimizer's step",
    "gradient_blocks": "blocks in which gradients are gathered on their way",
    "gradient_in_flight": "a gradient that autograd holds next to where it goes",
    "optimizer_temporaries": "what the step on the device takes next to its operands",
    "matrix_room": "room in which whole matrices are put together for their step",
    "matrix_staging": "pinned buffers through which such matrices go to the device and return",
    "staging": "pinned buffers through which new weights return to the device",
    "new_states": "second states, for updates during backward",
    "checkpoint": "copies while a checkpoint is written",
    "state_window": "states that were read from the disk for their step",
    "file_window": "weights that were read from their files",
}
"""Part of a plan's memory -> a sentence about it."""


def write_page(path: str | os.PathLike[str], *views: View, rows: Iterable[Row] = ()) -> Path:
    """Writes the page, atomically.

    Args:
        path: of the file; it ends in ``.html``.
        views: of `plan_view` or `trace_view`, shown side by side.
        rows: of `elixir.show.tables.compare`, shown above them.
    """
    compared = [[name, show_value(name, a), show_value(name, b), a != b] for name, a, b in rows]
    data = json.dumps({"views": views, "rows": compared}, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    folder = files("elixir.show") / "html"
    parts = {
        "TITLE": " and ".join(view["title"] for view in views).replace("&", "&amp;").replace("<", "&lt;"),
        "LICENSE": (folder / "echarts.LICENSE.txt").read_text(encoding="utf-8").replace("--", "- -"),
        "DATA": data.replace("<", "\\u003c"),  # no value can end the script that it is in
        "ECHARTS": (folder / "echarts.common.min.js").read_text(encoding="utf-8"),
        "SCRIPT": (folder / "page.js").read_text(encoding="utf-8"),
    }
    first, *rest = (folder / "page.html").read_text(encoding="utf-8").split("{{")
    text = [first]
    for piece in rest:
        name, _, after = piece.partition("}}")
        text += [parts[name], after]
    return write_atomically(path, "".join(text))


def trace_view(trace: StepTrace) -> View:
    """The memory of one step in plain PyTorch, stacked by kind, and what is alive at its peak.

    Raises:
        InputError: the trace has no memory curve.
    """
    curve = trace.curve
    if not any(sample.total for sample in curve):
        raise InputError(f"the trace of {trace.model_name} holds no memory curve to draw")
    at = curve_positions(curve)
    kinds = [
        {"name": label, "colour": colour, "values": [sum(getattr(each, name) for name in names) for each in curve]}
        for label, colour, names in STACK
    ]
    phases = [[phase, at[max(start - 1, 0)], at[stop]] for phase, start, stop in phase_runs([s.phase for s in curve])]
    peak = max(curve, key=lambda sample: sample.total)
    return {
        "title": f"{trace.model_name}, one step on {trace.device}: {trace.dtype}, {trace.optimizer}",
        "verdict": f"{format_bytes(peak.total)} at its peak in {peak.phase}, in plain PyTorch",
        "memory": {"at": at, "kinds": [kind for kind in kinds if any(kind["values"])], "phases": phases},
        "peak": _peak(trace),
    }


def plan_view(
    plan: Plan | HasPlan,
    trace: StepTrace | None = None,
    hardware: HardwareProfile | None = None,
    *,
    explanation: Explanation | None = None,
    levers: Sequence[Effect] = (),
    must_be_free_bytes: int | None = None,
    measured: Sequence[Mapping[str, Any]] = (),
    notes: str = "",
) -> View:
    """A plan: its verdict, memory against budgets, one step over time in each scenario, and where each chunk lives.

    Args:
        plan: alone or in an answer.
        trace, hardware: what it was made from; without them there is no step over time.
        explanation: of `explain`: what each chunk would change elsewhere.
        levers: of `Answer.levers`.
        must_be_free_bytes: of each machine's memory.
        measured: figures of a run: ``name``, ``unit`` (bytes, seconds or count), ``predicted``, ``measured``.
        notes: text to copy, such as the arguments of a trainer.
    """
    plan = plan_of(plan)
    predicted = plan.predicted
    budgets = [
        ("device", predicted.device_parts, plan.device_budget_bytes, plan.device_reserve_bytes, None),
        ("host", predicted.host_parts, plan.host_budget_bytes, plan.host_reserve_bytes, must_be_free_bytes),
    ]
    if plan.uses_disk:
        parts = {"optimizer_states": predicted.disk_peak_bytes}
        budgets.append(("disk", parts, plan.disk_budget_bytes, 0, None))
    ranks = f"{plan.world_size} x " if plan.world_size > 1 else ""
    view: View = {
        "title": f"{plan.model_name} on {ranks}{plan.hardware_name}: {plan.dtype}, {plan.optimizer}",
        "verdict": _verdict(plan),
        "words": str(plan),
        "budgets": [_budget(*each) for each in budgets],
        "chunks": _chunks(plan, explanation),
        "levers": [_lever(lever) for lever in levers],
        "measured": [dict(each) for each in measured],
        "notes": notes,
    }
    if trace is not None and hardware is not None:
        view["modules"] = modules_over_step(plan, trace)
        view["kinds_over_step"] = _kinds(plan, trace, hardware)
        view["steps"] = [_step(plan, trace, hardware, scenario, regret) for scenario, regret in _shown(plan)]
        view["lanes"] = [RESOURCE_LABELS[name] for name in LANE_ORDER]
        view["kinds"] = [[name, colour] for name, colour in SPAN_COLOURS.items()]
        view["peak"] = _peak(trace)
    return view


def _verdict(plan: Plan) -> str:
    predicted = plan.predicted
    parts = [f"fits: {format_bytes(predicted.device_peak_bytes)} of {format_bytes(plan.device_budget_bytes)} of device"]
    parts.append(f"{format_bytes(predicted.host_peak_bytes)} of {format_bytes(plan.host_budget_bytes)} of host memory")
    times = predicted.range_s
    if plan.tokens_per_s is not None:
        speed = f"{plan.tokens_per_s:,.0f} tokens/s"
        if times is not None:
            low, high = (plan.tokens_per_s * predicted.step_s / each for each in reversed(times))
            speed += f" ({low:,.0f} to {high:,.0f})"
        parts.append(speed)
    parts.append(f"{format_seconds(predicted.step_s)} a step")
    return ", ".join(parts)


def _budget(memory: str, parts: Mapping[str, int], budget: int, reserve: int, needed: int | None) -> View:
    colours = part_colours(dict(parts))
    held = sorted(((name, size) for name, size in parts.items() if size), key=lambda part: (-part[1], part[0]))
    return {
        "memory": memory,
        "budget": budget,
        "reserve": reserve,
        "must_be_free": needed,
        "parts": [[part_label(name), size, colours[name], _PARTS.get(name, "")] for name, size in held],
    }


def _shown(plan: Plan) -> list[tuple[Scenario, float | None]]:
    """The scenarios that the page has, each with its regret: the nominal one, those that differ from it in one thing,
    and the worst."""
    judged = plan.predicted.judgements
    if not judged:
        return [(Scenario(), None)]
    worst = max(judged, key=lambda each: each.regret)
    first = judged[0].scenario
    return [(it.scenario, it.regret) for it in judged if it is worst or it.scenario.differences(first) <= 1]


def _step(
    plan: Plan, trace: StepTrace, hardware: HardwareProfile, scenario: Scenario, regret: float | None
) -> dict[str, Any]:
    machine = scenario.machine(hardware)
    simulated = simulate_step(plan, trace, machine, clipped=scenario.clipped)
    bound = f"{format_seconds(simulated.step_s)} a step, bound by {RESOURCE_LABELS[simulated.bound_by]}"
    slower = "" if not regret or regret < 0.0005 else f"; {regret:.1%} slower than the best plan for this"
    at_s, entries = zip(*entries_over_step(simulated, plan), strict=True)
    return {
        "scenario": str(scenario),
        "verdict": bound + slower,
        "step_s": simulated.step_s,
        "spans": _spans(simulated),
        "at": [_tick(each, simulated.step_s) for each in at_s],
        "entries": entries,
    }


def _kinds(plan: Plan, trace: StepTrace, hardware: HardwareProfile) -> list[View]:
    """The device memory by what holds it, for each entry of the plan's order and the step; activations uppermost."""
    parts = {
        name: amounts for name, amounts in device_memory(plan, trace, hardware.device_kind).items() if any(amounts)
    }
    colours = part_colours(plan.predicted.device_parts)
    return [
        {"name": part_label(name), "colour": colours.get(name, GREY), "values": _packed(parts[name].tolist())}
        for name in sorted(parts, key=lambda name: (name == "activations", len(set(parts[name].tolist()))))
    ]


def _packed(values: list[int]) -> list[int] | int:
    """The values; one number for all where they are equal."""
    return values[0] if len(set(values)) == 1 else values


def _tick(seconds: float, step_s: float) -> int:
    return round(seconds / step_s * _TICKS) if step_s else 0


def _spans(simulated: Simulation) -> list[int]:
    """Five numbers a span: lane, kind, chunk (-1 without), ticks since the start of the one before, and its length."""
    kinds = list(SPAN_COLOURS)
    numbers, before = [], 0
    for span in simulated.timeline:
        start, end = (_tick(seconds, simulated.step_s) for seconds in (span.start_s, span.end_s))
        chunk = -1 if span.chunk is None else span.chunk
        numbers += [LANE_ORDER.index(span.resource), kinds.index(span.name), chunk, start - before, end - start]
        before = start
    return numbers


def _chunks(plan: Plan, explanation: Explanation | None) -> View:
    """The chunks in order of first use; of each what another spot would change, if that is known."""
    reasons = {} if explanation is None else {each.chunk: each for each in explanation.chunks}
    texts: dict[str, int] = {}
    rows = []
    for index in order_of_use(plan):
        chunk = plan.chunks[index]
        names = [slot.name for slot in chunk.parameters]
        elsewhere = []
        for each in reasons[index].elsewhere if index in reasons else ():
            said = (texts.setdefault(text, len(texts)) for text in (str(each.spot), fits_text(each.change)))
            elsewhere.append([*said, float(f"{each.change.change_s:.3g}")])
        homes = ["resident" if chunk.resident else chunk.weight_home, chunk.state_home if chunk.trainable else "frozen"]
        about = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "no parameters"
        rows.append([index, chunk.weight_bytes, *homes, int(chunk.home.early), about, elsewhere])
    return {"rows": rows, "texts": list(texts), "colours": {**HOME_COLOURS, "resident": "#1F1454", "frozen": PALE}}


def _lever(lever: Effect) -> list[Any]:
    plan = lever.plan
    if plan is None or lever.step_s is None:
        return [lever.action, flags_of(lever.options), None, None, None, None, None]
    predicted = plan.predicted
    tokens = plan.tokens_per_s and plan.tokens_per_s * predicted.step_s / lever.step_s
    peaks = predicted.device_peak_bytes, predicted.host_peak_bytes
    return [lever.action, flags_of(lever.options), lever.step_s, lever.gain, tokens, *peaks]


def _peak(trace: StepTrace) -> View:
    holders = [[each.kind, each.module, each.operator, each.count, each.bytes] for each in peak_holders(trace)]
    return {"module": trace.peak_module, "operator": trace.peak_operator, "holders": holders[:20]}
