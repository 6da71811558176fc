"""Traces, profiles and plans for people: flat records for JSON and comparison, tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

from elixir.plan.activations import kept_text, result_names, way_of
from elixir.plan.chunk_plan import ChunkPlan, Weight, numel_text, packed_text
from elixir.plan.plan import Plan
from elixir.show.style import RESOURCE_LABELS, part_label
from elixir.step_trace import Direction, StepTrace, peak_holders
from elixir.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from elixir.search.advise.answer import Effect


def plan_levers_table(plan: Plan, levers: Sequence[Effect]) -> Table:
    """The effect of one change each on a plan: seconds, memory, speed (rich)."""
    body = [["as planned", *_lever_cells(plan, plan.predicted.step_s, 1.0), ""]]
    for lever in levers:
        cells = ["does not fit", "", "", ""]
        if lever.plan is not None and lever.step_s is not None:
            busiest = RESOURCE_LABELS[lever.busiest] if lever.busiest else ""
            cells = [*_lever_cells(lever.plan, lever.step_s, lever.gain), busiest]
        body.append([f"{lever.action}:\n{flags_of(lever.options)}", *cells])
    columns = ("change, and what to add", "step", "peaks", "speed", "then busiest")
    return list_table("what would help, one change at a time, at the profile's rates", columns, body)


def flags_of(options: Iterable[tuple[str, str]]) -> str:
    """The flags of the command line that set these arguments of a search or of the step to these values; a switch has
    an empty value."""
    words = ((name if name != "checkpoint" else "activation-checkpointing", value) for name, value in options)
    return " ".join(f"--{name.replace('_', '-')} {value}".rstrip() for name, value in words)


def _lever_cells(plan: Plan, step_s: float, gain: float | None) -> list[str]:
    predicted = plan.predicted
    peaks = (
        f"{memory} {format_bytes(amount)}"
        for memory, amount in (("device", predicted.device_peak_bytes), ("host", predicted.host_peak_bytes))
    )
    tokens_per_s = None if plan.tokens_per_s is None else plan.tokens_per_s * predicted.step_s / step_s
    speed = [] if tokens_per_s is None else [f"{tokens_per_s:,.0f} tokens/s"]
    speed += [] if gain is None else [f"{gain:.2f} x"]
    scale = step_s / predicted.step_s if predicted.step_s else 1.0
    between = predicted.range_s and (scale * predicted.range_s[0], scale * predicted.range_s[1])
    return [range_cell(step_s, between), "\n".join(peaks), "\n".join(speed)]


def range_cell(seconds: float, between: tuple[float, float] | None) -> str:
    """Seconds for a column of a table, the range in which they may be in a second line."""
    text = format_seconds(seconds)
    if between is None:
        return text
    low, high = map(format_seconds, between)
    unit = text.split()[1]
    if low.endswith(f" {unit}") and high.endswith(f" {unit}"):
        low, high = low.split()[0], high.split()[0]
    return f"{text}\n{low} to {high}"


def trace_summary(trace: StepTrace) -> str:
    """The needs of a step, in a few lines."""
    weights = [Weight(param.name, param.dtype, param.numel, param.trainable) for param in trace.parameters]
    checkpointed, planned = len(trace.checkpointed_modules), trace.planned_peak_bytes
    moved = ""
    if trace.host_peak_bytes:
        out, back = (format_bytes(trace.transferred_bytes(way)) for way in get_args(Direction))
        moved = f"{format_bytes(trace.host_peak_bytes)} at most; {out} go there and {back} come back"
    lines = {
        "parameters": numel_text(weights),
        "weights": packed_text(weights, trace.step.quantised),
        "activation peak": format_bytes(trace.activation_peak_bytes),
        "backward peak": f"{format_bytes(trace.backward_peak_bytes)} without optimizer states, "
        f"in {trace.peak_module or 'the model'} ({trace.peak_operator})",
        "step peak": f"{format_bytes(trace.step_peak_bytes)} in plain PyTorch, states in the weights' dtype",
        "under a plan": ""
        if planned is None
        else f"{format_bytes(planned)} with float32 master weights and states, all on one device",
        "moved to host": moved,
        "traced": f"{trace.operators:,} operators, {len(trace.accesses):,} uses of parameters, "
        f"in {trace.trace_s:.2f} s, no GPU",
    }
    regions = f", {checkpointed} regions checkpointed" if checkpointed else ""
    head = f"{trace.model_name} on {trace.device}: {trace.dtype}, {trace.optimizer}{regions}"
    return "\n".join((head, *(f"  {name:17}{text}" for name, text in lines.items() if text)))


def trace_shown(trace: StepTrace, *, brief: bool = False) -> Iterator[str | Table]:
    """The memory profile of a step: totals, where the peak is, what is alive there, and what was assumed."""
    yield trace_summary(trace)
    if not brief:
        yield memory_table(trace)
        yield contributors_table(trace)
    for name, found in (
        ("unused parameters", trace.unused_parameters),
        ("modules that never ran", trace.unused_modules),
    ):
        if found:
            yield f"{name}: {len(found)}: {', '.join(found[:5])}{', ...' if len(found) > 5 else ''}"
    yield from (f"assumed: {assumption}" for assumption in trace.assumptions)


def memory_table(trace: StepTrace) -> Table:
    """Bytes of a step by kind (rich)."""
    kinds = {
        "parameters": "param_bytes",
        "gradients": "grad_bytes",
        "optimizer states": "optimizer_bytes",
        "buffers": "buffer_bytes",
        "inputs": "input_bytes",
        "activations, at their peak": "activation_peak_bytes",
        "library workspace": "workspace_bytes",
    }
    rows = [[kind, format_bytes(getattr(trace, field))] for kind, field in kinds.items()]
    return list_table("memory by kind", ("kind", "size"), rows)


def plan_tables(plan: Plan) -> Iterator[Table]:
    """The memory of a plan and its chunks, by what they hold and where they live, and how it was judged."""
    yield parts_table(plan)
    yield homes_table(plan)
    if plan.activations:
        yield activations_table(plan)
    if plan.predicted.judgements:
        yield scenarios_table(plan)


def parts_table(plan: Plan) -> Table:
    """The contents of device and host at their predicted peaks (rich)."""
    rows = [
        [memory, part_label(name), format_bytes(size)]
        for memory, parts in (("device", plan.predicted.device_parts), ("host", plan.predicted.host_parts))
        for name, size in sorted(parts.items(), key=lambda part: (-part[1], part[0]))
        if size
    ]
    return list_table("predicted peaks", ("memory", "held by", "size"), rows)


def list_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of text under headings, columns that hold numbers to the right (rich)."""
    from rich import box
    from rich.table import Table

    body = [list(row) for row in rows]
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "padding": (0, 1, 0, 0), "pad_edge": False}
    table = Table(title=title, box=box.SIMPLE_HEAD, **look)
    for index, heading in enumerate(columns):
        numeric = bool(body) and all(row[index].lstrip("+-")[:1].isdigit() or row[index] in ("-", "") for row in body)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    return table


_CONTRIBUTORS = 10
"""Origins that have a line each."""


def contributors_table(trace: StepTrace) -> Table:
    """Allocations at the peak of forward and backward, the largest origins (rich).

    Repeated layers share a line: ``layers.*.fc1`` stands for that module in every layer.
    """
    ranked = peak_holders(trace)
    shown, others = ranked[:_CONTRIBUTORS], ranked[_CONTRIBUTORS:]
    rows = [[each.kind, each.module, each.operator, f"{each.count:,}", format_bytes(each.bytes)] for each in shown]
    if others:
        count, size = sum(each.count for each in others), sum(each.bytes for each in others)
        rows.append(["others", f"{len(others)} origins", "", f"{count:,}", format_bytes(size)])
    title = "alive at the peak of forward and backward"
    return list_table(title, ("kind", "module", "operator", "tensors", "size"), rows)


def scenarios_table(plan: Plan) -> Table:
    """Milliseconds in each scenario (rich), with digits enough to tell rows apart."""
    rows = [
        [
            f"{it.scenario.host_adam:.2g}",
            f"{it.scenario.link:.2g}",
            "yes" if it.scenario.clipped else "no",
            *(
                f"{1e3 * seconds:,.2f}" if seconds >= 1e-3 else f"{1e3 * seconds:.4g}"
                for seconds in (it.step_s, it.best_s)
            ),
            f"{100 * it.regret:.1f} %",
        ]
        for it in plan.predicted.judgements
    ]
    columns = ("CPU Adam", "links", "clipped", "step, ms", "best plan, ms", "slower by")
    return list_table("in each scenario, rates as parts of the profile's", columns, rows)


def homes_table(plan: Plan) -> Table:
    """How many chunks and bytes of weights live where (rich)."""
    groups: dict[tuple[str, str], list[ChunkPlan]] = {}
    for chunk in plan.chunks:
        weights = "device, resident" if chunk.resident else f"{chunk.weight_home}, streamed"
        groups.setdefault((weights, chunk.state_home if chunk.trainable else "none (frozen)"), []).append(chunk)
    rows = [
        [
            *homes,
            str(len(chunks)),
            numel_text(weight for chunk in chunks for weight in chunk.weights()),
            format_bytes(sum(chunk.weight_bytes for chunk in chunks)),
        ]
        for homes, chunks in sorted(groups.items())
    ]
    columns = ("weights", "gradients + states", "chunks", "parameters", "weight bytes")
    return list_table("homes of the chunks", columns, rows)


def activations_table(plan: Plan) -> Table:
    """The activations that each unit keeps for backward, successive units that do the same in one row (rich)."""
    rows = []
    for way, group in groupby(plan.activations, key=way_of):
        names = [each.unit for each in group]
        units = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rpartition('.')[2]} ({len(names)})"
        rows.append([units, kept_text(way), result_names(way.swap) or "nothing"])
    return list_table("activations of the units", ("units", "kept", "swapped"), rows)


def wear(plan: Plan, endurance_bytes: int | None = None) -> str:
    """The writing of a plan to disks in words.

    Args:
        plan: one that uses them.
        endurance_bytes: that may be written to the drive of one machine in its life; None: it is not known.
    """
    written = plan.disk_written_bytes
    text = f"  written to the disk of each machine: {format_bytes(written)} a step"
    if endurance_bytes is None or not written:
        return text
    return f"{text}; a drive for {format_bytes(endurance_bytes)} lasts {endurance_bytes // written:,} steps"
