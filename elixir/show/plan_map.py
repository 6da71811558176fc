"""The picture of a plan: budget bars of device and host over a map of the chunks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from elixir.errors import InputError
from elixir.plan.activations import kept_text, result_names, way_of
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.show import style
from elixir.step_trace import UnitActivations
from elixir.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOME_COLOURS = {"device": "#332288", "host": "#DDCC77", "disk": "#882255", "files": "#44AA99"}
"""Indigo, sand and wine of Paul Tol's muted scheme: safe for the colour-blind, and in no bar above the map."""

_PART_COLOURS = (
    ("rcache", style.YELLOW),
    ("block", "#A5D8C6"),
    ("flight", style.PALE),
    ("master", style.RED),
    ("grad", style.GREEN),
    ("state", style.SKY),
    ("optim", style.SKY),
    ("activation", style.ORANGE),
    ("buffer", style.GREY),
    ("workspace", style.PURPLE),
    ("weight", style.BLUE),
    ("param", style.BLUE),
)
"""Colour of a part by the first of these words in its name: the colours of the memory curve, where both know it."""

_LEGEND_COLUMNS = 3
_BAR_IN, _MAP_IN, _STRIP_IN = 0.26, 0.78, 0.16
"""Heights of the bar of a budget, of the map of chunks and of the strip of units, in inches."""


def plot_plan(plan: Plan | HasPlan, path: str | os.PathLike[str] | None = None) -> Figure:
    """A plan as a map: budget bars of device, host and (where states are there) disk over its chunks in order of use,
    width by size, home by colour.

    Raises:
        InputError: the plan has no chunks, or `path` names no picture format.
    """
    plan = plan_of(plan)
    if not plan.chunks:
        raise InputError(f"the plan for {plan.model_name} holds no chunks to draw")
    predicted = plan.predicted
    bars = [
        ("device", predicted.device_parts, predicted.device_peak_bytes, plan.device_budget_bytes),
        ("host", predicted.host_parts, predicted.host_peak_bytes, plan.host_budget_bytes),
    ]
    if plan.uses_disk:
        parts = {"optimizer_states": predicted.disk_peak_bytes}
        bars.append(("disk", parts, predicted.disk_peak_bytes, plan.disk_budget_bytes))
    # Laid out from the top in inches, because legends of one and of three lines need different room.
    heights = []
    for _, parts, _, _ in bars:
        lines = -(-sum(size > 0 for size in parts.values()) // _LEGEND_COLUMNS)
        heights.append(_BAR_IN + 0.46 + 0.155 * lines)
    ways = list(dict.fromkeys(map(way_of, plan.activations)))
    strip_in = 0.5 + 0.155 * len(ways) if ways else 0.0
    height = 0.3 + sum(heights) + 0.12 + _MAP_IN + 0.55 + strip_in
    figure = style.new_figure(height)
    top = height - 0.3
    for (label, parts, peak_bytes, budget_bytes), used_in in zip(bars, heights, strict=True):
        axes = figure.add_axes((0.13, (top - _BAR_IN) / height, 0.85, _BAR_IN / height))
        _draw_budget(axes, label, parts, peak_bytes, budget_bytes)
        top -= used_in
    top -= 0.12
    axes = figure.add_axes((0.13, (top - _MAP_IN) / height, 0.85, _MAP_IN / height))
    _draw_chunks(axes, plan)
    if ways:
        strip = figure.add_axes((0.13, (strip_in - 0.2) / height, 0.85, _STRIP_IN / height))
        _draw_units(strip, plan, ways)
    ranks = f"{plan.world_size} x " if plan.world_size > 1 else ""
    title = f"{plan.model_name} on {ranks}{plan.hardware_name}: {plan.dtype}, {plan.optimizer}"
    return style.finish(figure, path, title)


def order_of_use(plan: Plan) -> list[int]:
    """Indices of all chunks: by first use, then those the recorded order never names."""
    used = dict.fromkeys(index for use in plan.order for index in use.chunks)
    return [*used, *(index for index in range(len(plan.chunks)) if index not in used)]


def _draw_budget(axes: Axes, label: str, parts: dict[str, int], peak_bytes: int, budget_bytes: int) -> None:
    """One bar, filled by what holds the memory at its peak, with a line at the budget."""
    left, handles = 0.0, []
    colours = part_colours(parts)
    for name, size in sorted(parts.items(), key=lambda item: (-item[1], item[0])):
        if size > 0:
            axes.barh([0], [size / GIB], left=left, height=1, color=colours[name], edgecolor="white", linewidth=0.4)
            handles.append(style.swatch(colours[name], f"{style.part_label(name)} {style.gib(size / GIB)}"))
            left += size / GIB
    budget = budget_bytes / GIB
    axes.axvline(budget, color=style.DARK, linewidth=1.6)
    _frame(axes, max(budget, peak_bytes / GIB) * 1.005, (-0.5, 0.5), {0.0: f"{label}\n(GiB)"})
    _corner(axes, f"{style.gib(peak_bytes / GIB)} of {style.gib(budget)} GiB")
    if handles:
        style.legend(axes, handles, columns=_LEGEND_COLUMNS, below=0.2 / _BAR_IN)


def part_colours(parts: dict[str, int]) -> dict[str, str]:
    """A colour for each part; where two would share one, the smaller gets the next that is free."""
    colours: dict[str, str] = {}
    for name in sorted(parts, key=lambda name: (-parts[name], name)):
        wanted = next((colour for word, colour in _PART_COLOURS if word in name.lower()), style.GREY)
        order = (wanted, style.RED, style.PURPLE, style.YELLOW, style.GREY, style.PALE)
        colours[name] = next((colour for colour in order if colour not in colours.values()), wanted)
    return colours


def _draw_chunks(axes: Axes, plan: Plan) -> None:
    """Two lanes of cells: homes of weights above, of gradients and states below; a dark cap marks the resident."""
    chunks = [plan.chunks[index] for index in order_of_use(plan)]
    # Between neighbours of a pixel or two, white gaps would wash the colours out.
    gap = 0.5 if len(chunks) <= 60 else 0.2 if len(chunks) <= 200 else 0.08
    widths = [chunk.weight_bytes / GIB for chunk in chunks]
    lefts = [0.0, *accumulate(widths)]
    look: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": gap}
    weights = [HOME_COLOURS[chunk.weight_home] for chunk in chunks]
    states = [HOME_COLOURS[chunk.state_home] if chunk.trainable else style.PALE for chunk in chunks]
    for bottom, colours in ((1.0, weights), (0.0, states)):
        axes.bar(lefts[:-1], 0.86, widths, bottom, color=colours, **look)
    caps = [(left, width) for left, width, chunk in zip(lefts, widths, chunks, strict=False) if chunk.resident]
    for left, width in caps:
        axes.bar([left], 0.1, width, 1.88, align="edge", color=style.DARK, linewidth=0)
    _frame(axes, lefts[-1], (0, 2), {1.43: "weights", 0.43: "gradients\n+ states"})
    axes.set_xlabel("chunks in order of first use (GiB of weights)", fontsize=style.TEXT_PT, labelpad=2)
    blocks = (
        f", {plan.block_count} rCache blocks of {style.gib(plan.block_bytes / GIB)} GiB" if plan.block_count else ""
    )
    _corner(axes, f"{len(chunks)} chunks{blocks}")
    handles = [
        style.swatch(colour, f"on the {home}")
        for home, colour in HOME_COLOURS.items()
        if any(home in (chunk.weight_home, chunk.state_home) for chunk in chunks)
    ]
    if caps:
        handles.append(style.swatch(style.DARK, "resident all step"))
    if not all(chunk.trainable for chunk in chunks):
        handles.append(style.swatch(style.PALE, "frozen: no states"))
    style.legend(axes, handles, columns=4, below=0.36 / _MAP_IN)


def _draw_units(axes: Axes, plan: Plan, ways: Sequence[UnitActivations]) -> None:
    """A cell for each unit whose activations the plan decides on, in order; its colour says what it keeps."""
    colours = (style.PALE, style.ORANGE, style.SKY, style.GREEN, style.PURPLE, style.RED, style.GREY)
    colour_of = {way: colours[number % len(colours)] for number, way in enumerate(ways)}
    cells = [colour_of[way_of(each)] for each in plan.activations]
    axes.bar(range(len(cells)), 1, 1, align="edge", color=cells, edgecolor="white")
    _frame(axes, len(cells), (0, 1), {0.5: "units"})
    axes.set_xticks([])
    handles = [
        style.swatch(colour, f"keep {kept_text(way)}" + (f", {result_names(way.swap)} on the host" if way.swap else ""))
        for way, colour in colour_of.items()
    ]
    style.legend(axes, handles, columns=1, below=0.06 / _STRIP_IN)


def _frame(axes: Axes, width: float, height: tuple[float, float], labels: dict[float, str]) -> None:
    axes.set_xlim(0, width or 1.0)
    axes.set_ylim(*height)
    axes.set_yticks([*labels], [*labels.values()])
    axes.tick_params(axis="y", length=0)


def _corner(axes: Axes, text: str) -> None:
    axes.annotate(
        text, (1, 1), xytext=(0, 2), xycoords="axes fraction", textcoords="offset points", ha="right", va="bottom",
        fontsize=style.SMALL_PT, color=style.DARK,
    )  # fmt: skip
