"""Measured points and fitted lines. matplotlib is imported on first use; no pyplot, no global state."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elixir.artifact import write_atomically
from elixir.errors import InputError
from elixir.microbench.fitting import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("pdf", "png", "svg")
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
    ending = None if path is None else check_picture(path)
    families: dict[str, list[Measured]] = {}
    for result in results:
        if result.series is not None and result.series.points:
            families.setdefault(_family(result.key), []).append(result)
    if not families:
        raise InputError("nothing was measured, so there is nothing to draw")
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(families))
    rows = math.ceil(len(families) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
    for place, (family, members) in enumerate(families.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        for index, result in enumerate(members):
            assert result.series is not None  # kept out above
            amounts, seconds = zip(*result.series.points, strict=True)
            colour = f"C{index % 10}"
            label = result.key + ("" if result.fit else " (no fit)")
            axes.plot(amounts, seconds, "o", color=colour, markersize=3.5, label=label)
            if result.fit is not None:
                line = [
                    amounts[0] * (amounts[-1] / amounts[0]) ** (step / (_LINE_POINTS - 1))
                    for step in range(_LINE_POINTS)
                ]
                axes.plot(line, [result.fit.seconds(amount) for amount in line], "-", color=colour, linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=members[0].series.unit, ylabel="seconds")  # type: ignore[union-attr]
        axes.set_title(family, loc="left", fontsize=9)
        axes.grid(True, alpha=0.25, linewidth=0.5)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=6, frameon=False)
    if path is not None:
        buffer = io.BytesIO()
        # Without a date the same points give the same file; PNG carries none.
        metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(ending or "")
        figure.savefig(buffer, format=ending, dpi=150, metadata=metadata)
        write_atomically(path, buffer.getvalue())
    return figure


def _family(key: str) -> str:
    """``matmul.bfloat16.tall`` -> ``matmul``; both directions of the host link share a panel."""
    family = key.split(".", 1)[0]
    return "host link" if family in ("host_to_device", "device_to_host") else family
