"""Rows of a sweep for people: a pandas frame, tables for a terminal, a heat map."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elixir.errors import InputError
from elixir.plan.prediction import range_text
from elixir.search.whatif.prices import Prices, RunCost
from elixir.search.whatif.sweep import SweepRow
from elixir.show import style
from elixir.show.tables import list_table, range_cell
from elixir.units import format_bytes

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

_LETTERS = {
    "compute": "C", "host_to_device": "H", "device_to_host": "D", "network": "N", "host_adam": "A", "refresh": "R",
    "disk": "K",
}  # fmt: skip
"""The bound of a step, in a cell of the heat map."""
_CELL_IN, _WIDEST_IN, _NARROWEST_IN = 0.3, 0.62, 0.42
"""Height of a cell of the heat map, and the bounds of its width, in inches."""


def to_frame(rows: Sequence[SweepRow]) -> pandas.DataFrame:
    """The rows as a table, a column per field; what is not known is missing (``NaN``, ``<NA>``)."""
    import pandas

    fields = dataclasses.fields(SweepRow)
    frame = pandas.DataFrame([dataclasses.asdict(row) for row in rows], columns=[field.name for field in fields])
    whole = [field.name for field in fields if str(field.type).startswith("int")]
    # Plain integers cannot be missing, and floats would lose the last digits of bytes.
    return frame.astype(dict.fromkeys(whole, "Int64"))


def sweep_table(rows: Sequence[SweepRow], title: str = "on paper", prices: Prices | None = None) -> Table:
    """One line per combination; one that does not fit shows the number of its reason in `reasons`, from 1 (rich).

    With `prices` a column says what an hour and a million tokens cost.
    """
    jobs = {(row.model, row.batch) for row in rows}
    columns = [
        "machine",
        "step",
        "per s, FLOP/s a device",
        "peak of device, host",
        "bound by, chunks with states on host",
    ]
    if prices is not None:
        columns.append(f"{prices.currency} an hour, a million tokens")
    body = []
    for row in rows:
        machine = f"{row.world_size} x {row.machine}"
        cost = [] if prices is None else [_cost_cell(prices.cost(row))]
        if not row.fits:
            number = reasons(rows).index(row.reason) + 1
            body.append([machine, "-", "-", "-", f"does not fit [{number}]", *cost])
            continue
        step, speed = range_cell(row.step_s or 0.0, _range(row)), f"{_speed(row)}\n{speed_of_device(row, 'T')}"
        peaks = f"{format_bytes(row.device_peak_bytes or 0)}\n{format_bytes(row.host_peak_bytes or 0)}"
        on_disk = f", {row.states_on_disk_chunks} on disk" if row.states_on_disk_chunks else ""
        states = f"{row.states_on_host_chunks} of {row.chunks}{on_disk}"
        bound = style.RESOURCE_LABELS.get(row.bound_by or "", row.bound_by or "")
        body.append([machine, step, speed, peaks, f"{bound}\n{states}", *cost])
    if len(jobs) > 1:
        columns = ["model", *columns]
        body = [[f"{row.model}\nbatch {row.batch}", *cells] for row, cells in zip(rows, body, strict=True)]
    else:
        title = ", ".join([title, *(f"{model}, batch {batch}" for model, batch in jobs)])
    return list_table(title, columns, body)


def speed_of_device(row: SweepRow, unit: str = "") -> str:
    """TFLOP/s of one device and their share of its peak, such as ``412 (42 %)``, or ``412 T (42 %)``."""
    if not row.device_flops_per_s:
        return "-"
    share = "" if row.peak_share is None else f" ({100 * row.peak_share:.0f} %)"
    return f"{row.device_flops_per_s / 1e12:.3g}{unit and f' {unit}'}{share}"


def _cost_cell(cost: RunCost | None) -> str:
    return "-" if cost is None else f"{cost.per_hour:.2f}\n{cost.per_million:.3g}"


def cost_text(row: SweepRow, cost: RunCost, currency: str, amount: float | None) -> str:
    """One sentence on what a row costs, with the offer it rests on; of a run of `amount` tokens or samples if given."""
    offer = cost.offer
    several = f"{-(-row.world_size // offer.devices)} offers of {offer.devices}: see that one machine has them all; "
    text = (
        f"{row.world_size} x {row.machine}: {cost.per_hour:.2f} {currency} an hour "
        f"({several if offer.devices < row.world_size else ''}{offer.source}, read on {offer.read_on}), "
        f"{cost.per_million:.3g} {currency} a million {cost.unit}"
    )
    if amount is not None:
        days = cost.of(amount) / cost.per_hour / 24
        text += f", {cost.of(amount):,.2f} {currency} and {days:,.1f} days for {amount:,.0f} {cost.unit}"
    if offer.host_memory_bytes is None and row.must_be_free_bytes is not None:
        text += (
            f"; see that {format_bytes(row.must_be_free_bytes)} of host memory are free on each machine, which the "
            "price file does not say"
        )
    return text


def _range(row: SweepRow) -> tuple[float, float] | None:
    return None if row.fastest_s is None or row.slowest_s is None else (row.fastest_s, row.slowest_s)


def reasons(rows: Sequence[SweepRow]) -> list[str]:
    """The reasons why combinations do not fit, each once, in order."""
    return list(dict.fromkeys(row.reason for row in rows if not row.fits))


def fit_table(rows: Sequence[SweepRow], title: str, prices: Prices | None = None) -> Table:
    """One line per method and machine, with the settings that were chosen (rich). One that does not fit shows the
    number of its reason in `reasons`, from 1."""
    columns = ["method", "machine", "settings", "tokens/s", "of each device", "host, must be free", "bound by"]
    if prices is not None:
        columns.append(f"{prices.currency} an hour, a million tokens")
    body = []
    for row in rows:
        named = [row.method or "-", f"{row.world_size} x {row.machine}"]
        cost = [] if prices is None else [_cost_cell(prices.cost(row))]
        if not row.fits:
            number = reasons(rows).index(row.reason) + 1
            body.append([*named, f"does not fit [{number}]", "-", "-", "-", "-", *cost])
            continue
        peaks = [format_bytes(amount or 0) for amount in (row.device_peak_bytes, row.must_be_free_bytes)]
        bound = style.RESOURCE_LABELS.get(row.bound_by or "", row.bound_by or "")
        body.append([*named, settings_text(row), _speeds(row), *peaks, bound, *cost])
    if not any(row.method for row in rows):
        columns, body = columns[1:], [cells[1:] for cells in body]
    return list_table(title, columns, body)


def settings_text(row: SweepRow) -> str:
    """The settings of a row that fits, in words."""
    passes = f" in passes of {row.pass_size}" if (row.pass_size or 1) > 1 else ""
    found = [
        f"rank {row.lora}" if row.lora else "",
        row.quantised or "",
        f"moments in {row.moments}" if row.moments != "float32" else "",
        "activations chosen" if row.activations else "",
        f"checkpointing {row.checkpoint}" if row.checkpoint not in (None, "none") else "",
        "fused kernels" if row.fused_kernels else "",
        f"batch {row.batch} x {row.accumulation}{passes}",
    ]
    return ", ".join(filter(None, found))


def _speeds(row: SweepRow) -> str:
    """Tokens or samples a second, and their range in a second line."""
    speed, between = _amount(row), _range(row)
    if speed is None or row.step_s is None:
        return "-"
    digits = ",.0f" if row.tokens_per_s is not None else ",.1f"
    unit = "" if row.tokens_per_s is not None else " samples/s"
    low_high = [format(speed * row.step_s / seconds, digits) for seconds in reversed(between or ())]
    return f"{speed:{digits}}{unit}" + (f"\n{' to '.join(low_high)}" if low_high else "")


def row_text(row: SweepRow) -> str:
    """One line on a combination: its time a step and its speed, or why it does not fit."""
    named = f"{row.model}, batch {row.batch}, {row.world_size} x {row.machine}"
    if row.method:
        named = f"{row.method}: {named}"
    if not row.fits:
        return f"{named}: does not fit: {row.reason}"
    return f"{named}: {range_text(row.step_s or 0.0, _range(row))} a step, {_speed(row)} per s"


def plot_sweep(rows: Sequence[SweepRow], path: str | os.PathLike[str] | None = None) -> Figure:
    """Speed of every combination as a heat map: a row per model and batch, a column per machine and world size.

    Colours are logarithmic; a letter says what bounds the step; a combination that does not fit is crossed out.

    Args:
        rows: of `elixir.search.whatif.sweep.sweep`.
        path: to write it to, in the format its ending names.

    Raises:
        InputError: there are no rows, or `path` names no picture format.
    """
    from matplotlib.colors import LogNorm

    if not rows:
        raise InputError("there are no rows to draw")
    down = list(dict.fromkeys((row.model, row.batch) for row in rows))
    across = list(dict.fromkeys((row.machine, row.world_size) for row in rows))
    width_in = min(max(3.6 / len(across), _NARROWEST_IN), _WIDEST_IN) * len(across)
    whole_in, height_in = width_in + 1.9, 0.95 + _CELL_IN * len(down)
    figure = style.new_figure(height_in)
    figure.set_figwidth(whole_in)
    axes = figure.add_axes((1.3 / whole_in, 0.62 / height_in, width_in / whole_in, _CELL_IN * len(down) / height_in))
    speeds = [[math.nan] * len(across) for _ in down]
    for row in rows:
        speeds[down.index((row.model, row.batch))][across.index((row.machine, row.world_size))] = (
            _amount(row) or math.nan
        )
    known = [speed for line in speeds for speed in line if speed > 0]
    norm = LogNorm(min(known, default=1.0) / 2, max(known, default=1.0) * 1.01)
    # A map that is made for every kind of colour vision. The brightness of a cell says which ink reads better.
    axes.pcolormesh(speeds, norm=norm, cmap="cividis", edgecolors="white", linewidth=0.8)
    axes.set_facecolor(style.PALE)
    axes.invert_yaxis()
    for row in rows:
        place = across.index((row.machine, row.world_size)) + 0.5, down.index((row.model, row.batch)) + 0.5
        amount = _amount(row)
        ink = style.DARK if not amount or norm(amount) > 0.6 else "white"
        text = f"{_short(amount)} {_LETTERS.get(row.bound_by or '', '')}" if amount else "\N{MULTIPLICATION SIGN}"
        axes.text(*place, text, ha="center", va="center", fontsize=style.SMALL_PT - 1, color=ink)
    axes.set_yticks([at + 0.5 for at in range(len(down))], [f"{model}, batch {batch}" for model, batch in down])
    named = {across.index(next(each for each in across if each[0] == machine)) for machine, _ in across}
    labels = [f"{count}\n{machine}" if at in named else str(count) for at, (machine, count) in enumerate(across)]
    axes.set_xticks([at + 0.5 for at in range(len(across))], labels)
    for at in sorted(named)[1:]:
        axes.axvline(at, color="white", linewidth=3)
    axes.tick_params(length=0)
    unit = "tokens" if all(row.tokens_per_s is not None for row in rows if row.fits) else "samples"
    used = {row.bound_by for row in rows}
    handles = [
        style.swatch("none", f"{letter} {style.RESOURCE_LABELS[name]}")
        for name, letter in _LETTERS.items()
        if name in used
    ]
    if any(not row.fits for row in rows):
        handles.append(style.swatch(style.PALE, "does not fit"))
    style.legend(axes, handles, columns=len(handles), title="bound by", below=0.42 / (_CELL_IN * len(down)))
    axes.spines[:].set_visible(False)
    return style.finish(figure, path, f"{unit} per second, all ranks together (simulated)")


def _amount(row: SweepRow) -> float | None:
    return row.samples_per_s if row.tokens_per_s is None else row.tokens_per_s


def _speed(row: SweepRow) -> str:
    if row.tokens_per_s is not None:
        return f"{row.tokens_per_s:,.0f} tokens"
    return "-" if row.samples_per_s is None else f"{row.samples_per_s:,.1f} samples"


def _short(amount: float) -> str:
    """Three digits or fewer: 940, 1.2k, 56k, 1.3M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if amount >= size * 0.9995:
            value = amount / size
            return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
    return f"{amount:.0f}" if amount >= 9.95 else f"{amount:.1f}"
