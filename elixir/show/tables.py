"""Traces, profiles and plans for people: flat records for JSON and comparison, tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

from elixir.artifact import Artifact
from elixir.errors import InputTypeError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import fit_unit
from elixir.plan.activations import kept_text, result_names, way_of
from elixir.plan.chunk_plan import ChunkPlan
from elixir.plan.packed_weights import Weight, numel_text, packed_text
from elixir.plan.peak_holders import peak_holders
from elixir.plan.plan import Plan
from elixir.plan.prediction import Prediction
from elixir.show.style import part_label
from elixir.step_trace import Direction, StepShape, StepTrace
from elixir.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from elixir.search.advise.answer import Effect
    from elixir.search.batches import BatchChoice

Record = dict[str, Any]


def trace_record(trace: StepTrace) -> Record:
    """The answer to "what does this step need?" as one flat object; keys ending in ``_bytes`` and ``_s`` say units."""
    return {
        "model": trace.model_name,
        **_fields(trace, "device dtype optimizer"),
        **_step_record(trace.step),
        "parameters": trace.numel,
        **_fields(
            trace,
            "param_bytes grad_bytes optimizer_bytes buffer_bytes input_bytes workspace_bytes activation_peak_bytes "
            "backward_peak_bytes step_peak_bytes planned_peak_bytes peak_module peak_operator",
        ),
        "moved_to_host_bytes": trace.host_peak_bytes,
        "accesses": len(trace.accesses),
        **_fields(trace, "operators flops"),
        "checkpointed_modules": len(trace.checkpointed_modules),
        "unused_parameters": list(trace.unused_parameters),
        "assumptions": list(trace.assumptions),
        **_fields(trace, "model_fingerprint trace_s"),
    }


def _fields(of: Artifact | Prediction, names: str) -> Record:
    """Fields and properties whose names a record keeps, by name."""
    return {name: getattr(of, name) for name in names.split()}


def _step_record(step: StepShape) -> Record:
    return {
        "samples": step.samples,
        "tokens": step.tokens,
        "activation_checkpointing": step.checkpoint,
        "fused_kernels": step.fused_kernels,
        "lora": step.lora,
        "quantised": step.quantised,
    }


def plan_record(plan: Plan) -> Record:
    """A plan as one flat object: the setting, the choices, the prediction."""
    predicted = plan.predicted
    return {
        "model": plan.model_name,
        "model_fingerprint": plan.model_fingerprint,
        "hardware": plan.hardware_name,
        **_fields(plan, "hardware_fingerprint world_size dtype optimizer moments"),
        **_step_record(plan.step),
        "accumulation": plan.accumulation,
        "chunks_updated_early": sum(chunk.home.early for chunk in plan.chunks),
        **_fields(
            plan,
            "clipping overlap placement device_budget_bytes host_budget_bytes disk_budget_bytes device_reserve_bytes "
            "host_reserve_bytes host_threads start_up_s",
        ),
        **plan.counts,
        **_fields(plan, "block_count block_bytes grad_block_count prefetch_depth"),
        **_fields(predicted, "device_peak_bytes host_peak_bytes disk_peak_bytes"),
        **{f"{link}_bytes": amount for link, amount in sorted(predicted.moved_bytes.items())},
        **_fields(predicted, "loads hits"),
        **{f"{part}_s": seconds for part, seconds in sorted(predicted.seconds.items())},
        "plan_fingerprint": plan.fingerprint,
    }


def hardware_record(profile: HardwareProfile) -> Record:
    """A hardware profile as one flat object, sources and measured points left out."""
    record = {key: value for key, value in profile.to_dict().items() if key not in ("artifact", "schema_version")}
    record.pop("sources")
    for dtype, rate in record.pop("flops_per_s").items():
        record[f"{dtype}_flops_per_s"] = rate
    del record["fits"]
    for key, fit in profile.fits.items():
        record[f"{key}_{fit_unit(key)}_per_s"] = fit.per_s
        record[f"{key}_latency_s"] = fit.latency_s
        record[f"{key}_fit_error"] = fit.error
    return record | {"fingerprint": profile.fingerprint}


def record_of(artifact: Artifact) -> Record:
    """The flat record of any of the three artifacts."""
    if isinstance(artifact, StepTrace):
        return trace_record(artifact)
    if isinstance(artifact, Plan):
        return plan_record(artifact)
    if isinstance(artifact, HardwareProfile):
        return hardware_record(artifact)
    raise InputTypeError(f"expected a StepTrace, HardwareProfile or Plan, found {type(artifact).__name__}")


def plan_levers_table(plan: Plan, levers: Sequence[Effect]) -> Table:
    """The effect of one change each on a plan: seconds, memory, speed (rich)."""
    body = [["as planned", *_lever_cells(plan, 1.0)]]
    for lever in levers:
        flags = " ".join(f"{flag_of(name)} {value}".rstrip() for name, value in lever.options)
        cells = ["does not fit", "", ""] if lever.plan is None else _lever_cells(lever.plan, lever.gain)
        body.append([f"{lever.action}:\n{flags}", *cells])
    columns = ("change, and what to add", "step", "peaks", "speed")
    return list_table("what would help, one change at a time, at the profile's rates", columns, body)


def flag_of(argument: str) -> str:
    """The flag of the command line that sets an argument of a search or of the step."""
    return {"checkpoint": "--activation-checkpointing"}.get(argument, f"--{argument.replace('_', '-')}")


def _lever_cells(plan: Plan, gain: float | None) -> list[str]:
    predicted = plan.predicted
    peaks = (
        f"{memory} {format_bytes(amount)}"
        for memory, amount in (("device", predicted.device_peak_bytes), ("host", predicted.host_peak_bytes))
    )
    speed = [] if plan.tokens_per_s is None else [f"{plan.tokens_per_s:,.0f} tokens/s"]
    speed += [] if gain is None else [f"{gain:.2f} x"]
    return [range_cell(predicted.step_s, predicted.range_s), "\n".join(peaks), "\n".join(speed)]


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


@dataclass(frozen=True)
class Row:
    """One line of a comparison."""

    name: str
    a: Any
    b: Any

    @property
    def differs(self) -> bool:
        """Whether the two sides are not the same."""
        return bool(self.a != self.b)


def compare(a: Artifact, b: Artifact) -> tuple[Row, ...]:
    """Two artifacts of one kind, field by field; a field only one of them has is None on the other side.

    Raises:
        InputTypeError: the two are not of one kind.
    """
    if type(a) is not type(b):
        raise InputTypeError(f"cannot compare a {type(a).__name__} with a {type(b).__name__}; give two of one kind")
    left, right = record_of(a), record_of(b)
    names = [*left, *(name for name in right if name not in left)]
    return tuple(Row(name, left.get(name), right.get(name)) for name in names)


def moved_parameters(a: Plan, b: Plan) -> tuple[str, ...]:
    """Names of the parameters that the two plans place differently, or that only one of them has, in order of `a`."""
    homes_a, homes_b = _homes(a), _homes(b)
    names = [*homes_a, *(name for name in homes_b if name not in homes_a)]
    return tuple(name for name in names if homes_a.get(name) != homes_b.get(name))


def _homes(plan: Plan) -> dict[str, tuple[str, str, bool]]:
    return {
        slot.name: (chunk.weight_home, chunk.state_home, chunk.resident)
        for chunk in plan.chunks
        for slot in chunk.parameters
    }


def show_value(name: str, value: Any) -> str:
    """`value` for a person, in the unit that the ending of `name` tells."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _show_number(name, value)
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    return str(value)


def _show_number(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.1f} GB/s"
    if name.endswith("_flops_per_s"):
        return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.1f} GFLOP/s"
    if name.endswith("_numel_per_s"):
        return f"{value / 1e9:,.2f} G elements/s"
    if name == "flops":
        return f"{value / 1e12:,.1f} TFLOP"
    if name.endswith("_s"):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def trace_summary(trace: StepTrace) -> str:
    """The needs of a step, in a few lines."""
    weights = [Weight(param.name, param.dtype, param.numel, param.trainable) for param in trace.parameters]
    packed = packed_text(weights, trace.step.quantised)
    checkpointed = len(trace.checkpointed_modules)
    regions = f", {checkpointed} regions checkpointed" if checkpointed else ""
    planned, as_planned = trace.planned_peak_bytes, tuple[str, ...]()
    if planned is not None:
        as_planned = (
            f"  under a plan     {format_bytes(planned)} with float32 master weights and states, all on one device",
        )
    moved = tuple[str, ...]()
    if trace.host_peak_bytes:
        out, back = map(trace.transferred_bytes, get_args(Direction))
        moved = (
            f"  moved to host    {format_bytes(trace.host_peak_bytes)} at most; {format_bytes(out)} go there and "
            f"{format_bytes(back)} come back",
        )
    return "\n".join(
        (
            f"{trace.model_name} on {trace.device}: {trace.dtype}, {trace.optimizer}{regions}",
            f"  parameters       {numel_text(weights)}",
            *([f"  weights          {packed}"] if packed else []),
            f"  activation peak  {format_bytes(trace.activation_peak_bytes)}",
            f"  backward peak    {format_bytes(trace.backward_peak_bytes)} without optimizer states, "
            f"in {trace.peak_module or 'the model'} ({trace.peak_operator})",
            f"  step peak        {format_bytes(trace.step_peak_bytes)} in plain PyTorch, states in the weights' dtype",
            *as_planned,
            *moved,
            f"  traced           {trace.operators:,} operators, {len(trace.accesses):,} uses of parameters, "
            f"in {trace.trace_s:.2f} s, no GPU",
        )
    )


def memory_table(trace: StepTrace) -> Table:
    """Bytes of a step by kind (rich)."""
    rows = (
        ("parameters", trace.param_bytes),
        ("gradients", trace.grad_bytes),
        ("optimizer states", trace.optimizer_bytes),
        ("buffers", trace.buffer_bytes),
        ("inputs", trace.input_bytes),
        ("activations, at their peak", trace.activation_peak_bytes),
        ("library workspace", trace.workspace_bytes),
    )
    return list_table("memory by kind", ("kind", "size"), [[kind, format_bytes(size)] for kind, size in rows])


def parts_table(plan: Plan) -> Table:
    """The contents of device and host at their predicted peaks (rich)."""
    rows: list[list[str]] = []
    for memory, parts in (("device", plan.predicted.device_parts), ("host", plan.predicted.host_parts)):
        for name, size in sorted(parts.items(), key=lambda part: (-part[1], part[0])):
            if size:
                rows.append([memory, part_label(name), format_bytes(size)])
    return list_table("predicted peaks", ("memory", "held by", "size"), rows)


def list_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of text under headings, columns that hold numbers to the right (rich)."""
    body = [list(row) for row in rows]
    table = _table(title)
    for index, heading in enumerate(columns):
        numeric = bool(body) and all(row[index].lstrip("+-")[:1].isdigit() or row[index] in ("-", "") for row in body)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    return table


def record_table(title: str, record: Mapping[str, Any]) -> Table:
    """A record as a two-column table (rich)."""
    table = _table(title)
    table.add_column("field", no_wrap=True)
    table.add_column("value", justify="right", overflow="fold")
    for name, value in record.items():
        table.add_row(_label(name), show_value(name, value))
    return table


def comparison_table(title: str, a: str, b: str, rows: tuple[Row, ...]) -> Table:
    """Two artifacts side by side (rich); rows that differ carry a mark, and for numbers the change."""
    table = _table(title)
    table.add_column("", no_wrap=True)
    table.add_column("field", no_wrap=True)
    for heading in (a, b):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("change", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            "*" if row.differs else "",
            _label(row.name),
            show_value(row.name, row.a),
            show_value(row.name, row.b),
            _change(row),
            style="bold" if row.differs else "dim",
        )
    return table


_CONTRIBUTORS = 10
"""Origins that have a line each."""


def contributors_table(trace: StepTrace) -> Table:
    """Allocations at the peak of forward and backward, the largest origins (rich).

    Repeated layers share a line: ``layers.*.fc1`` stands for that module in every layer.
    """
    ranked = peak_holders(trace)
    shown, others = ranked[:_CONTRIBUTORS], ranked[_CONTRIBUTORS:]
    rows = [[each.kind, each.module, each.operator, f"{each.tensors:,}", format_bytes(each.bytes)] for each in shown]
    if others:
        count, size = sum(each.tensors for each in others), sum(each.bytes for each in others)
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
    table = _table("homes of the chunks")
    for heading in ("weights", "gradients + states"):
        table.add_column(heading, no_wrap=True)
    for heading in ("chunks", "parameters", "weight bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    groups: dict[tuple[str, str], list[ChunkPlan]] = {}
    for chunk in plan.chunks:
        weights = "device, resident" if chunk.resident else f"{chunk.weight_home}, streamed"
        groups.setdefault((weights, chunk.state_home if chunk.trainable else "none (frozen)"), []).append(chunk)
    for (weights, states), chunks in sorted(groups.items()):
        numel = numel_text(weight for chunk in chunks for weight in chunk.weights())
        size = format_bytes(sum(chunk.weight_bytes for chunk in chunks))
        table.add_row(weights, states, str(len(chunks)), numel, size)
    return table


def activations_table(plan: Plan) -> Table:
    """The activations that each unit keeps for backward, successive units that do the same in one row (rich)."""
    table = _table("activations of the units")
    for heading in ("units", "kept", "swapped"):
        table.add_column(heading)
    for way, group in groupby(plan.activations, key=way_of):
        names = [each.unit for each in group]
        units = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rpartition('.')[2]} ({len(names)})"
        table.add_row(units, kept_text(way), result_names(way.swap) or "nothing")
    return table


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


def batch_table(choice: BatchChoice) -> Table:
    """Every way to cut a step's samples into batches, the chosen one marked (rich)."""
    columns = ("", "batch", "times", "checkpointing", "step", "device peak", "host peak", "why not")
    rows = [
        [
            "*" if option == choice.option else "",
            str(option.batch),
            str(option.accumulation),
            option.checkpoint,
            show_value("step_s", option.step_s),
            show_value("device_peak_bytes", option.device_peak_bytes),
            show_value("host_peak_bytes", option.host_peak_bytes),
            option.reason,
        ]
        for option in choice.options
    ]
    return list_table("ways to cut the step's samples into batches", columns, rows)


def _change(row: Row) -> str:
    for side in (row.a, row.b):
        if isinstance(side, bool) or not isinstance(side, (int, float)):
            return ""
    if not row.differs:
        return ""
    sign = "+" if row.b > row.a else "-"
    return sign + show_value(row.name, abs(row.b - row.a))


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
_UNIT_LABELS = {
    "_bytes_per_s": " bandwidth", "_flops_per_s": " peak rate", "_numel_per_s": " rate", "_bytes": "", "_s": " time",
}  # fmt: skip
"""Ending of a field -> what a person calls it, the unit being shown with the value."""


def _label(name: str) -> str:
    if name in _LABELS:
        return _LABELS[name]
    for ending, words in _UNIT_LABELS.items():
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " ") + words
    return name.replace("_", " ")


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    padding = (0, 1, 0, 0)
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=padding, pad_edge=False
    )
