"""The picture of a step's memory, good enough for a paper."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from elixir.errors import InputError
from elixir.show import style
from elixir.step_trace import CurveSample, StepTrace
from elixir.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STACK = (
    ("parameters", style.BLUE, ("parameters",)),
    ("optimizer states", style.SKY, ("optimizer",)),
    ("gradients", style.GREEN, ("gradients",)),
    ("buffers", style.GREY, ("buffers",)),
    ("activations + inputs", style.ORANGE, ("inputs", "activations")),
    ("workspace", style.PURPLE, ("workspace",)),
)
"""The layers from the bottom: label, colour, fields of `CurveSample`. The kind that stays longest lies lowest."""

_OPTIMIZER_SHARE = 0.12
"""Share of the picture's width for the optimizer phase, whose operators have no common measure with the others."""


def plot_memory(trace: StepTrace, path: str | os.PathLike[str] | None = None) -> Figure:
    """Memory over one training step, stacked by kind, with its phases and its peak named.

    Raises:
        InputError: the trace has no curve, or `path` names no picture format.
    """
    if not any(sample.total for sample in trace.curve):
        raise InputError(f"the trace of {trace.model_name} holds no memory curve to draw")
    figure = style.new_figure(2.9)
    axes = figure.add_subplot()
    xs = curve_positions(trace.curve)
    peak = max(range(len(trace.curve)), key=lambda index: trace.curve[index].total)
    layers, handles = [], []
    for label, colour, fields in STACK:
        values = [sum(getattr(sample, name) for name in fields) / GIB for sample in trace.curve]
        if not any(values):
            continue
        layers.append(values)
        handles.append(style.swatch(colour, f"{label}  {style.gib(values[peak])}"))
    colours = [handle.get_facecolor() for handle in handles]
    axes.stackplot(xs, layers, colors=colours, linewidth=0)
    top = trace.curve[peak].total / GIB
    axes.set_ylim(0, top * 1.42)
    axes.set_xlim(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1)
    axes.set_ylabel("device memory (GiB)", fontsize=style.TEXT_PT)
    axes.set_xticks([])
    _draw_phases(axes, trace.curve, xs)
    _draw_peak(axes, trace, xs, peak)
    # Reversed, so that the legend reads from the top as the stack does.
    style.legend(axes, handles[::-1], columns=3, title="at the peak, in GiB")
    title = f"{trace.model_name}, one step on {trace.device}: {trace.dtype}, {trace.optimizer}"
    return style.finish(figure, path, title)


def curve_positions(curve: Sequence[CurveSample]) -> list[float]:
    """Places each sample by its operator; the optimizer phase has a share of the width, sample by sample.

    One fused optimizer operator may be the whole phase, and one foreach operator the whole way up and down again.
    """
    xs = [float(sample.operator) for sample in curve]
    first = next((i for i, sample in enumerate(curve) if sample.phase == "optimizer"), None)
    if first is None or first == 0:
        return xs
    start = xs[first - 1]
    width = max(start - xs[0], 1.0) * _OPTIMIZER_SHARE / (1 - _OPTIMIZER_SHARE)
    count = len(curve) - first
    return xs[:first] + [start + width * (i + 1) / count for i in range(count)]


def _draw_phases(axes: Axes, curve: Sequence[CurveSample], xs: Sequence[float]) -> None:
    """A strip along the top: which phase runs when; recomputation is darker inside backward."""
    tones = {"forward": "#EEEEEE", "backward": "#D4D4D4", "recompute": "#8A8A8A", "optimizer": "#EEEEEE"}
    bottom, middle = 0.925, 0.9595
    for phase, start, stop in phase_runs([sample.phase for sample in curve]):
        axes.axvspan(xs[max(start - 1, 0)], xs[stop], bottom, 1, color=tones[phase], linewidth=0, zorder=3)
    recomputes = any(sample.phase == "recompute" for sample in curve)
    box = {"facecolor": "white", "alpha": 0.8, "pad": 0.8, "linewidth": 0}
    for phase, start, stop in phase_runs(["backward" if each.phase == "recompute" else each.phase for each in curve]):
        left, right = xs[max(start - 1, 0)], xs[stop]
        if start:
            axes.axvline(left, color=style.DARK, linewidth=0.5, linestyle=(0, (3, 2)), zorder=4)
        share, dark = (right - left) / max(xs[-1] - xs[0], 1e-9), phase == "backward" and recomputes
        if share > 0.05:
            text = "step" if phase == "optimizer" else phase + " (dark: recompute)" * (dark and share >= 0.3)
            axes.text(
                (left + right) / 2, middle, text, transform=axes.get_xaxis_transform(), ha="center", va="center",
                fontsize=style.SMALL_PT, color=style.DARK, zorder=5, bbox=box if dark else None,
            )  # fmt: skip


def _draw_peak(axes: Axes, trace: StepTrace, xs: Sequence[float], peak: int) -> None:
    """A mark at the highest total with its size, module and operator; next to one in the optimizer, the one before
    it."""
    sample = trace.curve[peak]
    running = [style.shorten(trace.peak_module or "outside any module", 44), style.shorten(trace.peak_operator, 44)]
    lines = [f"peak {style.gib(sample.total / GIB)} GiB in {sample.phase}", *running]
    ran = [index for index, other in enumerate(trace.curve) if other.phase != "optimizer"]
    if sample.phase == "optimizer" and ran:
        # The model's own peak is what a change of the model can lower, so it is named as well.
        before = max(ran, key=lambda index: trace.curve[index].total)
        earlier = trace.curve[before]
        _mark_peak(axes, xs[before], earlier, face="white")
        lines = [
            f"peak {style.gib(sample.total / GIB)} GiB in the optimizer step",
            f"before it {style.gib(earlier.total / GIB)} GiB in {earlier.phase}: {running[0]}",
            running[1],
        ]
    _mark_peak(axes, xs[peak], sample, face=style.DARK)
    # Towards the middle of the picture, so that the longest names stay inside it.
    early = xs[peak] - xs[0] < 0.47 * (xs[-1] - xs[0])
    axes.annotate(
        "\n".join(lines), (xs[peak], sample.total / GIB), xytext=(-4 if early else 4, 6), textcoords="offset points",
        ha="left" if early else "right", va="bottom", fontsize=style.SMALL_PT, color=style.DARK, zorder=6,
        bbox={"facecolor": "white", "alpha": 0.85, "pad": 0.6, "linewidth": 0}, linespacing=1.15,
    )  # fmt: skip


def _mark_peak(axes: Axes, x: float, sample: CurveSample, *, face: str) -> None:
    look: dict[str, Any] = {"color": style.DARK, "markerfacecolor": face, "zorder": 7, "clip_on": False}
    axes.plot([x], [sample.total / GIB], marker="v", markersize=4.5, **look)


def phase_runs(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    """Consecutive equal entries as (entry, first index, last index)."""
    runs = [[index for index, _ in run] for _, run in groupby(enumerate(phases), key=lambda pair: pair[1])]
    return [(phases[run[0]], run[0], run[-1]) for run in runs]
