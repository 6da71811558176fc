"""Traces, profiles and plans for people: flat records for JSON and comparison, tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, get_args

from elixir.artifact import Artifact
from elixir.errors import InputTypeError, few
from elixir.hardware.profile import IF_DOUBTFUL, HardwareProfile, doubtful_rates
from elixir.hardware.rate_fit import fit_unit
from elixir.plan.activations import kept_text, result_names, way_of
from elixir.plan.chunk_plan import ChunkPlan, Weight, numel_text, packed_text
from elixir.plan.plan import Plan
from elixir.show.style import RESOURCE_LABELS, part_label
from elixir.step_trace import Direction, StepTrace, peak_holders
from elixir.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from elixir.search.advise.answer import Effect
    from elixir.search.batches import BatchChoice

Record = dict[str, Any]
"""Keys that end in ``_bytes`` or ``_s`` say units."""
_STEP = (
    "samples=step.samples tokens=step.tokens packed=step.packed activation_checkpointing=step.checkpoint "
    "fused_kernels=step.fused_kernels lora=step.lora quantised=step.quantised"
)
_TRACE = (
    f"model=model_name device dtype optimizer {_STEP} parameters=numel param_bytes grad_bytes optimizer_bytes "
    "buffer_bytes input_bytes workspace_bytes activation_peak_bytes backward_peak_bytes step_peak_bytes "
    "planned_peak_bytes peak_module peak_operator moved_to_host_bytes=host_peak_bytes operators flops "
    "unused_parameters assumptions model_fingerprint trace_s"
)
_PLAN = (
    "model=model_name model_fingerprint hardware=hardware_name hardware_fingerprint world_size dtype optimizer moments "
    f"{_STEP} accumulation clipping overlap placement device_budget_bytes host_budget_bytes disk_budget_bytes "
    "device_reserve_bytes host_reserve_bytes host_threads start_up_s block_count block_bytes grad_block_count "
    "prefetch_depth device_peak_bytes=predicted.device_peak_bytes host_peak_bytes=predicted.host_peak_bytes "
    "disk_peak_bytes=predicted.disk_peak_bytes loads=predicted.loads hits=predicted.hits plan_fingerprint=fingerprint"
)
"""Keys of a record in order; what comes after = is the attribute, where it is called otherwise."""


def record_of(artifact: Artifact) -> Record:
    """A trace, a hardware profile without its sources and measured points, or a plan, as one flat object."""
    if isinstance(artifact, StepTrace):
        counts = {name: len(getattr(artifact, name)) for name in ("accesses", "checkpointed_modules")}
        return _fields(artifact, _TRACE) | counts
    if isinstance(artifact, Plan):
        predicted = artifact.predicted
        return {
            **_fields(artifact, _PLAN),
            "chunks_updated_early": sum(chunk.home.early for chunk in artifact.chunks),
            **artifact.counts,
            **{f"{link}_bytes": amount for link, amount in sorted(predicted.moved_bytes.items())},
            **{f"{part}_s": seconds for part, seconds in sorted(predicted.seconds.items())},
        }
    if not isinstance(artifact, HardwareProfile):
        raise InputTypeError(f"expected a StepTrace, HardwareProfile or Plan, found {type(artifact).__name__}")
    apart = ("artifact", "schema_version", "sources", "flops_per_s", "fits")
    record = {key: value for key, value in artifact.to_dict().items() if key not in apart}
    record |= {f"{dtype}_flops_per_s": rate for dtype, rate in artifact.flops_per_s.items()}
    for key, fit in artifact.fits.items():
        record[f"{key}_{fit_unit(key)}_per_s"] = fit.per_s
        record[f"{key}_latency_s"] = fit.latency_s
        record[f"{key}_fit_error"] = fit.error
    return record | {"fingerprint": artifact.fingerprint}


def _fields(of: Artifact, keys: str) -> Record:
    pairs = [key.partition("=") for key in keys.split()]
    return {name: attrgetter(attribute or name)(of) for name, _, attribute in pairs}


def record_table(title: str, record: Mapping[str, Any]) -> Table:
    """A record as a two-column table (rich)."""
    return list_table(title, ("field", "value"), ([_label(name), show_value(name, record[name])] for name in record))


def hardware_shown(profile: HardwareProfile) -> Iterator[str | Table]:
    """Every number, its source, and whether it is to be doubted."""
    yield record_table(f"{profile.name}: {profile.device_name}", record_of(profile))
    if profile.sources:
        yield list_table("sources", ("number", "source"), profile.sources.items())
    doubtful = [f"{name} ({why})" for name, why in doubtful_rates(profile).items()]
    if doubtful:
        yield f"doubtful: {len(doubtful)} of the rates: {few(doubtful)}\n{IF_DOUBTFUL}"


def presets_table(profiles: Iterable[HardwareProfile]) -> Table:
    """The machines that are known, a line each (rich)."""
    rows = [
        [
            profile.name,
            profile.device_name,
            format_bytes(profile.device_memory_bytes),
            f"{profile.device_memory_bytes_per_s / 1e9:,.0f} GB/s",
            f"{profile.flops_per_s['bfloat16'] / 1e12:,.4g} TFLOP/s",
            show_value("_bytes_per_s", profile.host_to_device_bytes_per_s),
        ]
        for profile in profiles
    ]
    columns = ("name", "device", "memory", "bandwidth", "bf16 peak", "host link")
    return list_table("hardware presets", columns, rows)


def batch_table(choice: BatchChoice) -> Table:
    """Every way to cut a step's samples into batches, the chosen one marked (rich)."""
    columns = ("", "batch", "times", "checkpointing", "step", "device peak", "host peak", "why not")
    rows = [
        [
            "*" if option == choice.option else "",
            str(option.batch),
            str(option.accumulation),
            option.checkpoint,
            *(show_value(name, getattr(option, name)) for name in ("step_s", "device_peak_bytes", "host_peak_bytes")),
            option.reason,
        ]
        for option in choice.options
    ]
    return list_table("ways to cut the step's samples into batches", columns, rows)


Row = tuple[str, Any, Any]
"""The name of a field, and its values in both."""


def compare(a: Artifact, b: Artifact, costs: Sequence[Mapping[str, Any]] = ({}, {})) -> list[Row]:
    """All fields of two artifacts; one that only one of them has is None on the other side. Of plans the speed comes
    first.

    Args:
        a, b: of one kind.
        costs: of each, by name, if they are known; they come next.

    Raises:
        InputTypeError: the two are not of one kind.
    """
    if type(a) is not type(b):
        raise InputTypeError(f"cannot compare a {type(a).__name__} with a {type(b).__name__}; give two of one kind")
    speeds = [{"tokens_per_s": each.tokens_per_s} if isinstance(each, Plan) else {} for each in (a, b)]
    left, right = (speed | dict(cost) | record_of(of) for speed, cost, of in zip(speeds, costs, (a, b), strict=True))
    return [(name, left.get(name), right.get(name)) for name in dict.fromkeys((*left, *right))]


def moved_parameters(a: Plan, b: Plan) -> list[str]:
    """Names of the parameters that the two plans place differently, or that only one of them has, in order of `a`."""
    left, right = (
        {
            slot.name: (chunk.weight_home, chunk.state_home, chunk.resident)
            for chunk in plan.chunks
            for slot in chunk.parameters
        }
        for plan in (a, b)
    )
    return [name for name in dict.fromkeys((*left, *right)) if left.get(name) != right.get(name)]


def comparison_table(title: str, rows: Sequence[Row]) -> Table:
    """Both side by side (rich); rows that differ carry a mark, and for numbers the change."""
    body = []
    for name, left, right in rows:
        shown = [_label(name), show_value(name, left), show_value(name, right)]
        body.append(["*" if left != right else "", *shown, _change(name, left, right)])
    return list_table(title, ("", "field", "a", "b", "change"), body)


def _change(name: str, left: Any, right: Any) -> str:
    numbers = all(isinstance(side, (int, float)) and not isinstance(side, bool) for side in (left, right))
    if not numbers or left == right:
        return ""
    return ("+" if right > left else "-") + show_value(name, abs(right - left))


def show_value(name: str, value: Any) -> str:
    """`value` for a person, in the unit that the ending of `name` tells."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    if not isinstance(value, (int, float)):
        return str(value)
    ending = _ending(name)
    if ending is not None:
        return _UNITS[ending][1](value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


_LABELS = {
    "optimizer_bytes": "optimizer states",  # "optimizer" is the field with its name
    "host_to_device_bytes": "moved host to device",
    "device_to_host_bytes": "moved device to host",
    "network_bytes": "moved by the network",
    "disk_read_bytes": "read from disk",
    "disk_write_bytes": "written to disk",
    "disk_peak_bytes": "on disk",
    "weights_on_host_chunks": "chunks with weights on host",
    "states_on_host_chunks": "chunks with states on host",
    "states_on_disk_chunks": "chunks with states on disk",
    "block_count": "rCache blocks",
    "block_bytes": "size of a block",
    "grad_block_count": "gradient blocks",
    "loads": "rCache loads",
    "hits": "rCache hits",
}
"""Fields whose name alone would not tell a person what they are."""
_UNITS: dict[str, tuple[str, Callable[[float], str]]] = {
    "_bytes": ("", format_bytes),
    "bytes": ("bytes", format_bytes),
    "_bytes_per_s": (" bandwidth", lambda rate: f"{rate / 1e9:,.1f} GB/s"),
    "_flops_per_s": (
        " peak rate",
        lambda rate: f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s",
    ),
    "_numel_per_s": (" rate", lambda rate: f"{rate / 1e9:,.2f} G elements/s"),
    "_per_s": (" a second", lambda rate: f"{rate:,.0f}"),
    "_s": (" time", format_seconds),
    "flops": ("flops", lambda amount: f"{amount / 1e12:,.1f} TFLOP"),
}
"""Ending of a field -> what a person calls it, the unit being shown with the value, and how the value is shown."""


def _ending(name: str) -> str | None:
    return next((ending for ending in _UNITS if name.endswith(ending)), None)


def _label(name: str) -> str:
    ending = _ending(name)
    words = name if ending is None else name.removesuffix(ending) + _UNITS[ending][0]
    return _LABELS.get(name, words.replace("_", " "))


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


def report_figures(report: Mapping[str, Any]) -> list[Record]:
    """Figures of a step's report (`StepReport.to_dict`) that have a prediction: ``name``, ``unit``, both values."""
    found = []
    for key, predicted in report.items():
        name = key.removeprefix("predicted_")
        unit = "bytes" if name.endswith("_bytes") else "seconds" if name.endswith("_s") else "count"
        shown = name.removesuffix("_bytes").replace("step_s", "step").replace("_", " ")
        figure = {"name": shown, "unit": unit, "predicted": predicted, "measured": report.get(name)}
        found += [figure] if name != key and is_figure(figure) else []
    return found


_MEASURED: dict[object, Callable[[Any], str]] = {"bytes": format_bytes, "seconds": format_seconds, "count": str}


def is_figure(found: object) -> bool:
    """Whether something from a file has all that `measured_table` shows, with finite numbers."""
    if not isinstance(found, dict) or found.get("unit") not in tuple(_MEASURED):
        return False
    values = found.get("predicted"), found.get("measured")
    return "name" in found and all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def measured_table(title: str, figures: Iterable[Record]) -> Table:
    """Figures of `report_figures`, or of a trial: predicted next to measured (rich)."""
    rows = []
    for each in figures:
        predicted, measured = each["predicted"], each["measured"]
        share = f"{(measured - predicted) / predicted:+.1%}" if predicted else ""
        rows.append([str(each["name"]), *map(_MEASURED[each["unit"]], (predicted, measured)), share])
    return list_table(title, ("of one step", "predicted", "measured", "difference"), rows)


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
