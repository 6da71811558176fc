"""Three pictures of a run: distances of predicted peaks, tokens per second, simulated over measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.proof.jobs import Row
from benchmark.proof.report import LINKS_PERCENT, MEMORY_WORST_PERCENT

OURS, THEIRS, BAR = "#0072B2", "#999999", "#D55E00"
"""Colours of Okabe and Ito's palette, told apart by people who see few colours."""


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """PNG files of whatever there are rows for."""
    ok = [row for row in rows if row["status"] == "ok"]
    made = [_memory(ok, folder), *(_speed(ok, part, folder) for part in ("resident", "offload")), _links(ok, folder)]
    return [path for path in made if path is not None]


def _axes(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.26 * count), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path


def _memory(ok: Sequence[Row], folder: Path) -> Path | None:
    rows = [row for row in ok if row["part"] == "memory"]
    if not rows:
        return None
    figure, axes = _axes(2 * len(rows))
    places = range(len(rows))
    for offset, key, color in ((-0.2, "backward_percent", OURS), (0.2, "step_percent", THEIRS)):
        label = key.removesuffix("_percent")
        axes.barh([place + offset for place in places], [row[key] for row in rows], 0.4, color=color, label=label)
    for side in (-MEMORY_WORST_PERCENT, MEMORY_WORST_PERCENT):
        axes.axvline(side, color=BAR, linewidth=1)
    axes.set_yticks(list(places), [row["case"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("predicted over measured peak, %; lines: the bar")
    axes.legend()
    return _save(figure, folder / "memory.png")


def _speed(ok: Sequence[Row], part: str, folder: Path) -> Path | None:
    rows = sorted(
        (row for row in ok if row["part"] == part and "tokens_per_s" in row), key=lambda row: str(row["case"])
    )
    if not rows:
        return None
    figure, axes = _axes(len(rows))
    colors = [OURS if row["kind"] == "elixir" else THEIRS for row in rows]
    # A line for 20th to 80th percentile of single steps.
    speeds = [row["tokens_per_s"] for row in rows]
    axes.barh(range(len(rows)), speeds, color=colors)
    for place, row in enumerate(rows):
        tokens = row["tokens_per_step"]
        axes.plot([tokens / row["p80_s"], tokens / row["p20_s"]], [place, place], color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row['case']}: {row['contender']}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second (line: 20th to 80th percentile of steps)")
    return _save(figure, folder / f"{part}.png")


def _links(ok: Sequence[Row], folder: Path) -> Path | None:
    compared = [row for row in ok if row.get("kind") == "compare"]
    if not compared:
        return None
    cases = compared[-1]["cases"]
    figure, axes = _axes(14)
    axes.scatter([case["measured_s"] for case in cases], [case["simulated_s"] for case in cases], color=OURS)
    top = max(max(case["measured_s"], case["simulated_s"]) for case in cases) * 1.05
    axes.plot([0, top], [0, top], color="black", linewidth=1)
    share = LINKS_PERCENT / 100
    axes.fill_between([0, top], [0, top * (1 - share)], [0, top * (1 + share)], color=BAR, alpha=0.15)
    axes.set_xlabel(f"measured step, s (band: {LINKS_PERCENT:g} %)")
    axes.set_ylabel("simulated step, s")
    return _save(figure, folder / "links.png")
