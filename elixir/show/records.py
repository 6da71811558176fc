"""Artifacts as flat records, for JSON, for a table, and side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from elixir.artifact import Artifact
from elixir.errors import InputTypeError, few
from elixir.hardware.profile import IF_DOUBTFUL, HardwareProfile, doubtful_rates
from elixir.hardware.rate_fit import fit_unit
from elixir.plan.plan import Plan
from elixir.show.tables import list_table
from elixir.step_trace import StepTrace
from elixir.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from elixir.search.batches import BatchChoice

Record = dict[str, Any]
"""Keys that end in ``_bytes`` or ``_s`` say units."""
_STEP = (
    "samples=step.samples tokens=step.tokens activation_checkpointing=step.checkpoint "
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
