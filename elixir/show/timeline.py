"""A simulated step over time, as a picture with one lane per resource."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elixir.errors import InputError, InputTypeError
from elixir.search.simulator.replay import RESOURCES, WorkSpan
from elixir.search.simulator.simulation import Simulation
from elixir.show import style
from elixir.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
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
    axes.set_title(f"{title}: {text}" if title else text, **style.title_style())
    used = dict.fromkeys(span.name for span in simulation.timeline)
    handles = [style.swatch(colour, name) for name, colour in _COLOURS.items() if name in used]
    style.legend(axes, handles, columns=6, below=0.44 / (_LANE_IN * len(lanes)))
    return style.finish(figure, path)


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
    for name, colour in _COLOURS.items():
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
