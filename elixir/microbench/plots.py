"""Measured points and fitted lines. matplotlib is imported on first use; no pyplot, no global state."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elixir.artifact import write_atomically
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import RateFit, fit_unit
from elixir.microbench.fitting import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("pdf", "png", "svg")
_UNITS = {"numel": "elements", "flops": "FLOP", "bytes": "bytes"}
_COLUMNS = 2
_LINE_POINTS = 64


def check_picture(path: str | os.PathLike[str]) -> str:
    """The format that the ending of `path` names; `InputError` for another."""
    ending = Path(path).suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise InputError(f"a picture ends in .{', .'.join(FORMATS)}; found {str(path)!r}")
    return ending


def plot_fits(results: Sequence[Measured], path: str | os.PathLike[str] | None = None) -> Figure:
    """Seconds over amount, both logarithmic: one panel per family of keys, points as measured, the fit as a line.

    A series without a fit has points only, and says so in the legend.

    Raises:
        InputError: nothing was measured, or `path` names no picture format or cannot be written.
    """
    curves = [
        _Curve(result.key, result.series.unit, result.series.points, result.fit)
        for result in results
        if result.series is not None
    ]
    return _figure(curves, path, "nothing was measured, so there is nothing to draw")


def plot_profile(profile: HardwareProfile, path: str | os.PathLike[str] | None = None) -> Figure:
    """The fits of a profile as `plot_fits` draws them.

    Raises:
        InputError: the profile has none with points, as a preset, or `path` is no place for a picture.
    """
    curves = [_Curve(key, _UNITS[fit_unit(key)], fit.points, fit) for key, fit in profile.fits.items()]
    return _figure(curves, path, f"hardware {profile.name!r} holds no measured points to draw; measure with --measure")


class _Curve(NamedTuple):
    key: str
    unit: str
    points: tuple[tuple[float, float], ...]
    fit: RateFit | None


def _figure(curves: Sequence[_Curve], path: str | os.PathLike[str] | None, empty: str) -> Figure:
    ending = None if path is None else check_picture(path)
    families: dict[str, list[_Curve]] = {}
    for curve in curves:
        if curve.points:
            families.setdefault(_family(curve.key), []).append(curve)
    if not families:
        raise InputError(empty)
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatterSciNotation

    columns = min(_COLUMNS, len(families))
    rows = math.ceil(len(families) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
    for place, (family, members) in enumerate(families.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        for index, curve in enumerate(members):
            _draw(axes, curve, f"C{index % 10}")
        axes.set(xscale="log", yscale="log", xlabel=members[0].unit, ylabel="seconds")
        axes.set_title(family, loc="left", fontsize=9)
        axes.grid(True, alpha=0.25, linewidth=0.5)
        axes.tick_params(which="both", labelsize=7)
        for axis in (axes.xaxis, axes.yaxis):
            # Between the powers of ten only where there would be no other label.
            axis.set_minor_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
        axes.legend(fontsize=6, frameon=False)
    if path is not None:
        buffer = io.BytesIO()
        # Without a date the same points give the same file; PNG carries none.
        metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(ending or "")
        figure.savefig(buffer, format=ending, dpi=150, metadata=metadata)
        write_atomically(path, buffer.getvalue())
    return figure


def _draw(axes: Axes, curve: _Curve, colour: str) -> None:
    amounts, seconds = zip(*sorted(curve.points), strict=True)
    fit = curve.fit
    label = curve.key + ("" if fit else " (no fit)")
    axes.plot(amounts, seconds, "o", color=colour, markersize=3.5, label=label)
    if fit is not None:
        steps = (step / (_LINE_POINTS - 1) for step in range(_LINE_POINTS))
        line = [amounts[0] * (amounts[-1] / amounts[0]) ** step for step in steps]
        axes.plot(line, [fit.seconds(amount) for amount in line], "-", color=colour, linewidth=1)


def _family(key: str) -> str:
    """``matmul.bfloat16.tall`` -> ``matmul``; both directions of the host link share a panel."""
    family = key.split(".", 1)[0]
    return "host link" if family in ("host_to_device", "device_to_host") else family
