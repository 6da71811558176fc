"""The common look of the pictures, and how one becomes a file.

Vector formats or 300 dpi, colours that the colour-blind can tell apart. No pyplot and no lasting change of matplotlib's
settings, so that an application's own plots keep theirs. matplotlib is imported on first use.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elixir.artifact import write_atomically
from elixir.errors import InputError
from elixir.plan.prediction import CHECKPOINT_PART

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
DOTS_PER_INCH = 300
WIDTH_IN = 5.2
"""Figure width in inches. Scaled to a column of 3.5 inches, the smallest text is still 5 points high."""
TEXT_PT, SMALL_PT = 8.5, 7.5

# Okabe and Ito, "Color Universal Design" (2008): told apart with every common form of colour blindness.
BLUE, SKY, GREEN, ORANGE, RED, PURPLE, YELLOW = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442",
)  # fmt: skip
DARK, GREY, PALE = "#333333", "#999999", "#DDDDDD"


RESOURCE_LABELS = {
    "compute": "compute",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "network": "network",
    "host_adam": "CPU Adam",
    "refresh": "new weights to device",
    "disk": "disk",
}
"""Resources of `elixir.search.simulator`, as people call them."""


def is_page(path: str | os.PathLike[str] | None) -> bool:
    """Whether the ending of a path names a page, of `elixir.show.page`, and no picture."""
    return path is not None and Path(path).suffix.lower() == ".html"


def picture_format(path: str | os.PathLike[str]) -> str:
    """``png``, ``pdf`` or ``svg`` by the ending of `path`; `InputError` for any other."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise InputError(f"{os.fspath(path)!r} names no picture format; end it in .png, .pdf or .svg")
    return suffix


def render(figure: Figure, picture: str) -> bytes:
    """`figure` as a file of format `picture`; the same figure gives the same bytes (no date in it)."""
    from matplotlib import rc_context

    stamp = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[picture]
    buffer = io.BytesIO()
    # Type 42 keeps text selectable (publishers ask for it); the salt makes the ids of an svg repeatable.
    with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "elixir", "hatch.linewidth": 0.4}):
        figure.savefig(buffer, format=picture, dpi=DOTS_PER_INCH, bbox_inches="tight", pad_inches=0.04, metadata=stamp)
    return buffer.getvalue()


def new_figure(height_in: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in))
    FigureCanvasAgg(figure)
    return figure


def finish(figure: Figure, path: str | os.PathLike[str] | None, title: str | None = None) -> Figure:
    """Gives all axes one look, the first of them a title, and writes the figure if there is a path."""
    if title is not None:
        figure.axes[0].set_title(title, **title_style())
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        for spine in axes.spines.values():
            spine.set_linewidth(0.6)
        axes.tick_params(labelsize=SMALL_PT, width=0.6)
    if path is not None:
        write_atomically(path, render(figure, picture_format(path)))
    return figure


def title_style() -> dict[str, Any]:
    return {"fontsize": TEXT_PT, "loc": "left", "pad": 6}


def swatch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label, linewidth=0)


def legend(axes: Axes, handles: list[Any], *, columns: int, title: str | None = None, below: float = 0.02) -> None:
    axes.legend(
        handles=handles, title=title, title_fontsize=SMALL_PT, fontsize=SMALL_PT, ncols=columns, frameon=False,
        loc="upper left", bbox_to_anchor=(0.0, -below), borderaxespad=0.0, borderpad=0.2, handlelength=1.0,
        handleheight=0.8, columnspacing=1.2, handletextpad=0.5, labelspacing=0.35, alignment="left",
    )  # fmt: skip


def gib(amount_gib: float) -> str:
    """Two or three significant digits, never an exponent."""
    if 0 < amount_gib < 0.001:
        return "<0.001"
    if amount_gib < 0.1:
        return f"{amount_gib:.2g}"
    return f"{amount_gib:.{0 if amount_gib >= 100 else 1 if amount_gib >= 10 else 2}f}"


def shorten(text: str, limit: int) -> str:
    """`text`, its middle replaced by an ellipsis where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[: limit - 1 - half]}…{text[-half:]}"


def part_label(name: str) -> str:
    """The name of a part of a plan's memory, as people write it."""
    if name == CHECKPOINT_PART:
        return "copies during a save"  # not of activation checkpointing
    return name.replace("_", " ").replace("rcache", "rCache")
