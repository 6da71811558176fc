"""A simulated step in Chrome's trace event format, for Perfetto: who works on what, who waits for whom, and memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elixir.artifact import write_atomically
from elixir.plan.plan import Plan
from elixir.search.problem.from_plan import packed_step_of, trace_under
from elixir.search.problem.joined_trace import joined_trace
from elixir.search.simulator.replay import RESOURCES, WorkSpan
from elixir.search.simulator.simulation import Simulation
from elixir.show.style import RESOURCE_LABELS
from elixir.show.timeline import LANE_ORDER, check_simulation
from elixir.step_trace import StepTrace

_MICROSECONDS = 1e6
_WAITS = len(LANE_ORDER)
"""Thread of the waits of compute, below the lanes."""
_NAMES_SHOWN = 8
"""Parameters of a chunk that an event names."""
Event = dict[str, Any]


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
    """Device bytes whenever compute comes to another access; all but activations at their predicted peak."""
    live = _live_bytes(plan, trace)
    activations = plan.predicted.device_parts.get("activations", 0)
    rest = plan.predicted.device_peak_bytes - activations
    place = 0
    for span in (span for span in simulation.timeline if span.resource == RESOURCES[0]):
        following = (at % len(live) for at in range(place, place + len(live)))  # round and round, by micro-batches
        uses = ((at, plan.order[at]) for at in following)
        found = next((at for at, use in uses if (use.phase, *use.chunks[:1]) == (span.name, span.chunk)), None)
        place = place if found is None else found
        amount = 0 if found is None else live[found]
        kinds = {"weights, states and buffers": rest, "activations": min(amount, activations)}
        yield _event("C", "device memory", at_s=span.start_s, args=kinds)


def _live_bytes(plan: Plan, trace: StepTrace) -> list[int]:
    """Highest live bytes of the accesses of each entry of the plan's order."""
    entries, live, entry, use = packed_step_of(plan, trace).entry_of, [0] * len(plan.order), 0, 0
    for access in joined_trace(trace_under(plan, trace), plan.step.joined).accesses:
        if access.parameters:
            entry, use = entries[use], use + 1
        live[entry] = max(live[entry], access.live_bytes)
    return live
