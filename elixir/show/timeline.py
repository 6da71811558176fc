"""A simulated step over time: a picture with one lane per resource, or a file in Chrome's trace event format for
Perfetto, which shows who works on what, who waits for whom, and memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elixir.artifact import write_atomically
from elixir.errors import InputError, InputTypeError
from elixir.plan.plan import Plan
from elixir.search.problem.from_plan import packed_step_of, placement_of, setting_of, trace_under
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.simulator.replay import RESOURCES, WorkSpan
from elixir.search.simulator.simulation import Simulation
from elixir.show import style
from elixir.show.style import RESOURCE_LABELS
from elixir.step_trace import StepTrace
from elixir.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPAN_COLOURS = {
    "forward": style.BLUE,
    "recompute": style.SKY,
    "backward": style.GREEN,
    "optimizer": style.DARK,
    "norm": style.YELLOW,
    "fetch": style.ORANGE,
    "copy": style.GREY,
    "gather": "#999933",  # this and the four like it are of Paul Tol's muted scheme
    "reduce": "#882255",
    "offload": style.RED,
    "deliver": style.PALE,
    "update": style.PURPLE,
    "early update": "#117733",
    "add": "#DDCC77",
    "refresh": "#44AA99",
    "read": style.SKY,
    "write": style.DARK,
}
"""Name of a span -> its colour; no two of the steps of most plans share one, and no two in one lane are
alike to the colour-blind."""
LANE_ORDER = ("compute", "host_to_device", "network", "device_to_host", "host_adam", "refresh", "disk")
"""The lanes from the top: a chunk's way through a step."""
_LANE_IN, _BAR = 0.34, 0.72
"""Height of a lane in inches, and the share of it that its bars fill."""
_WIDE = 0.005
"""Share of the picture from which on a bar has room for a white edge, which tells it from its neighbours."""
_MICROSECONDS = 1e6
_WAITS = len(LANE_ORDER)
"""Thread of the waits of compute, below the lanes."""
_NAMES_SHOWN = 8
"""Parameters of a chunk that an event names."""
Event = dict[str, Any]
Ints = npt.NDArray[np.int64]


def plot_timeline(
    simulation: Simulation, path: str | os.PathLike[str] | None = None, *, title: str | None = None
) -> Figure:
    """The step as a Gantt chart: a lane per resource in use, with its share of the step; gaps in compute are waits.

    Args:
        simulation: of `simulate_step`.
        path: to write it to, in the format its ending names.
        title: before the step's time and what bounds it.

    Raises:
        InputError: nothing happens in the step, or `path` names no picture format.
    """
    check_simulation(simulation)
    lanes = [name for name in LANE_ORDER if any(span.resource == name for span in simulation.timeline)]
    unit_s, unit = (1.0, "s") if simulation.step_s >= 1 else (1e-3, "ms") if simulation.step_s >= 1e-3 else (1e-6, "µs")
    figure = style.new_figure(0.95 + _LANE_IN * len(lanes))
    axes = figure.add_subplot()
    for row, name in enumerate(lanes):
        spans = [span for span in simulation.timeline if span.resource == name]
        _draw_lane(axes, len(lanes) - 1 - row, spans, unit_s)
        share = simulation.utilisation[name]
        axes.annotate(
            f"{share:.0%}", (1, len(lanes) - 1 - row), xytext=(4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=style.SMALL_PT, color=style.DARK,
        )  # fmt: skip
    for at_s in _turns(simulation.timeline):
        axes.axvline(at_s / unit_s, color=style.DARK, linewidth=0.6, linestyle=(0, (3, 2)), zorder=3)
    axes.set_xlim(0, simulation.step_s / unit_s)
    axes.set_ylim(-0.5, len(lanes) - 0.5)
    axes.set_yticks(range(len(lanes)), [style.RESOURCE_LABELS[name] for name in reversed(lanes)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since the optimizer began ({unit})", fontsize=style.TEXT_PT, labelpad=2)
    text = f"{format_seconds(simulation.step_s)} a step, bound by {style.RESOURCE_LABELS[simulation.bound_by]}"
    used = dict.fromkeys(span.name for span in simulation.timeline)
    handles = [style.swatch(colour, name) for name, colour in SPAN_COLOURS.items() if name in used]
    style.legend(axes, handles, columns=6, below=0.44 / (_LANE_IN * len(lanes)))
    return style.finish(figure, path, f"{title}: {text}" if title else text)


def check_simulation(simulation: Simulation) -> None:
    """Refuses what is no simulation, or one in which nothing happens."""
    if not isinstance(simulation, Simulation):
        raise InputTypeError(f"simulation must be what simulate_step gives, got {type(simulation).__name__}")
    if not simulation.timeline:
        raise InputError(
            "nothing takes any time in this step, so there is no timeline; check the trace's FLOPs and bytes"
        )


def _draw_lane(axes: Axes, row: int, spans: Sequence[WorkSpan], unit_s: float) -> None:
    # An edge in a bar's own colour keeps the thinnest bars visible.
    narrowest_s = min(span.end_s - span.start_s for span in spans)
    apart = narrowest_s > _WIDE * max(span.end_s for span in spans)
    for name, colour in SPAN_COLOURS.items():
        bars = [(span.start_s / unit_s, (span.end_s - span.start_s) / unit_s) for span in spans if span.name == name]
        if bars:
            axes.broken_barh(
                bars, (row - _BAR / 2, _BAR), facecolors=colour, edgecolors="white" if apart else colour, linewidth=0.3
            )


def _turns(timeline: Sequence[WorkSpan]) -> list[float]:
    """The moments at which forward and backward begin."""
    turns, before = [], ""
    for span in timeline:
        if span.resource == RESOURCES[0]:
            now = {"recompute": "backward", "norm": "optimizer"}.get(span.name, span.name)
            if now != before and (before or now != "forward"):
                turns.append(span.start_s)
            before = now
    return turns


def chrome_trace(simulation: Simulation, plan: Plan, trace: StepTrace) -> dict[str, Any]:
    """The step in Chrome's trace event format ("JSON object format"), which Perfetto and chrome://tracing open.

    Every resource is a thread; times are in microseconds, as the format wants. Events name parameters and bytes of
    their chunk, arrows lead from each piece of work on a chunk to the next, a thread shows for which lane compute
    waits, and a counter shows device memory.

    Args:
        simulation: of `simulate_step`.
        plan: that was simulated.
        trace: that the plan was made from.

    Raises:
        InputError: nothing happens in the step, or plan and trace do not go together.
    """
    check_simulation(simulation)
    events = [_event("M", "process_name", args={"name": "one rank, simulated"})]
    for number, lane in enumerate([*(RESOURCE_LABELS[name] for name in LANE_ORDER), "compute waits for"]):
        events.append(_event("M", "thread_name", number, args={"name": lane}))
        events.append(_event("M", "thread_sort_index", number, args={"sort_index": number}))
    for span in simulation.timeline:
        about = {} if span.chunk is None else {"chunk": span.chunk} | _about(plan, span)
        name = span.name if span.chunk is None else f"{span.name} chunk {span.chunk}"
        events.append(_slice(name, span.name, span.start_s, span.end_s, LANE_ORDER.index(span.resource), about))
    events += [*_waits(simulation), *_flows(simulation), *_memory(simulation, plan, trace)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def save_chrome_trace(simulation: Simulation, path: str | os.PathLike[str], plan: Plan, trace: StepTrace) -> Path:
    """Writes `chrome_trace` to `path`, atomically; raises as it does."""
    text = json.dumps(chrome_trace(simulation, plan, trace), allow_nan=False, separators=(",", ":"))
    return write_atomically(path, text.encode())


def _event(kind: str, name: str, thread: int | None = None, at_s: float | None = None, **more: Any) -> Event:
    event: Event = {"ph": kind, "name": name, "pid": 0, **more}
    if at_s is not None:
        event["ts"] = at_s * _MICROSECONDS
    return event if thread is None else event | {"tid": thread}


def _slice(name: str, kind: str, start_s: float, end_s: float, thread: int, about: dict[str, Any]) -> Event:
    return _event("X", name, thread, start_s, dur=(end_s - start_s) * _MICROSECONDS, cat=kind, args=about)


def _about(plan: Plan, span: WorkSpan) -> dict[str, Any]:
    chunk = plan.chunks[span.chunk or 0]
    names = [slot.name for slot in chunk.parameters]
    more = [f"and {len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    whole = span.name in ("gather", "reduce") or span.resource == RESOURCES[0]
    return {
        "parameters": [*names[:_NAMES_SHOWN], *more],
        "bytes": chunk.weight_bytes if whole else chunk.weight_bytes // plan.world_size,
        "weights": "device, resident" if chunk.resident else chunk.weight_home,
        "states": chunk.state_home,
    }


def _waits(simulation: Simulation) -> Iterator[Event]:
    """Gaps in compute, each with the work that ends with it."""
    compute = [span for span in simulation.timeline if span.resource == RESOURCES[0]]
    others = {span.end_s: span for span in simulation.timeline if span.resource != RESOURCES[0]}
    ends = [0.0, *(span.end_s for span in compute)]
    starts = [*(span.start_s for span in compute), simulation.step_s]
    for begin_s, end_s in zip(ends, starts, strict=True):
        if end_s > begin_s:
            cause = others.get(end_s)
            about = {} if cause is None or cause.chunk is None else {"chunk": cause.chunk}
            name = "wait" if cause is None else f"{cause.name}: {RESOURCE_LABELS[cause.resource]}"
            yield _slice(name, "wait", begin_s, end_s, _WAITS, about)


def _flows(simulation: Simulation) -> Iterator[Event]:
    """Arrows from each piece of work on a chunk to the next one of another lane."""
    last: dict[int, WorkSpan] = {}
    number = 0
    for span in sorted(simulation.timeline, key=lambda span: (span.start_s, span.end_s)):
        before = None if span.chunk is None else last.get(span.chunk)
        if span.chunk is not None:
            last[span.chunk] = span
        if before is None or before.resource == span.resource:
            continue
        number += 1
        flow = {"id": number, "cat": "chunk"}
        name, lanes = f"chunk {span.chunk}", [LANE_ORDER.index(each.resource) for each in (before, span)]
        yield _event("s", name, lanes[0], min(before.end_s, span.start_s), **flow)
        yield _event("f", name, lanes[1], span.start_s, bp="e", **flow)


def _memory(simulation: Simulation, plan: Plan, trace: StepTrace) -> Iterator[Event]:
    """Device bytes whenever compute comes to another access."""
    parts = device_memory(plan, trace)
    total = np.sum(list(parts.values()), axis=0)
    for at_s, entry in entries_over_step(simulation, plan):
        activation_bytes = int(parts["activations"][entry])
        kinds = {"weights, states and buffers": int(total[entry]) - activation_bytes, "activations": activation_bytes}
        yield _event("C", "device memory", at_s=at_s, args=kinds)


def entries_over_step(simulation: Simulation, plan: Plan) -> Iterator[tuple[float, int]]:
    """Seconds at which compute comes to another entry of the plan's order, and which; the number of entries where it
    comes to the optimizer's step. Entries that one piece of work stands for share its time."""
    count, place, found = len(plan.order), 0, []
    for span in (span for span in simulation.timeline if span.resource == RESOURCES[0]):
        following = (at % count for at in range(place, place + count))  # round and round, by micro-batches
        uses = ((at, plan.order[at]) for at in following)
        entry = next((at for at, use in uses if (use.phase, *use.chunks[:1]) == (span.name, span.chunk)), None)
        place = place if entry is None else entry
        found.append((span, count if entry is None else entry))
    for (span, entry), after in zip(found, [*(entry for _, entry in found[1:]), count], strict=True):
        end = after if after >= entry else count
        entries = range(entry, max(end, entry + 1))
        for number, each in enumerate(entries):
            yield span.start_s + (span.end_s - span.start_s) * number / len(entries), each


def device_memory(plan: Plan, trace: StepTrace, device_kind: str = "cuda") -> dict[str, Ints]:
    """Device bytes by the names of `Prediction.device_parts`, at the highest of each entry of the plan's order, and
    last in the optimizer's step. The highest of all are those of the plan's peak.

    Args:
        plan: the plan.
        trace: that it was made from.
        device_kind: of the machine; a CPU steps moments in fewer bits in other pieces.
    """
    work, accesses = packed_step_of(plan, trace), trace_under(plan, trace).accesses
    setting = setting_of(plan, 1, device_kind)  # more ranks on a host would change nothing here
    curve = MemoryModel(work, setting).device_curve(placement_of(plan).codes, plan.block_count)
    stretches = np.searchsorted(work.facts.edges, np.arange(len(accesses)), side="right") - 1
    parts = {name: amounts[stretches] for name, amounts in curve.items()}
    parts["activations"] = np.array([access.live_bytes for access in accesses])
    total = np.sum(list(parts.values()), axis=0)
    highest = [max(found, key=lambda index: total[index]) for found in _accesses_by_entry(plan, trace)]
    return {name: np.append(amounts[highest], curve[name][-1]) for name, amounts in parts.items()}


def modules_over_step(plan: Plan, trace: StepTrace) -> list[str]:
    """The module that reads weights first in each entry of the plan's order."""
    accesses = trace_under(plan, trace).accesses
    return [accesses[found[0]].module for found in _accesses_by_entry(plan, trace)]


def _accesses_by_entry(plan: Plan, trace: StepTrace) -> list[list[int]]:
    entries, use = packed_step_of(plan, trace).entry_of, 0
    found: list[list[int]] = [[] for _ in plan.order]
    for index, access in enumerate(trace_under(plan, trace).accesses):
        use += bool(access.parameters)
        found[entries[max(use - 1, 0)]].append(index)  # what comes before the first counts for it
    return found
