"""Pictures: what they show, in which formats, and that they leave matplotlib as they found it."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color

from elixir.errors import InputError
from elixir.show.memory_curve import STACK, curve_positions, plot_memory
from elixir.show.plan_map import HOME_COLOURS, plot_plan
from elixir.show.style import DARK, PALE, gib, part_label, render, shorten
from elixir.step_trace import CurveSample, StepTrace, Unit, UnitActivations
from elixir.units import GIB
from tests.common.samples import make_plan, make_trace

MAGIC = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}


@pytest.mark.parametrize("name", list(MAGIC))
def test_each_format_is_what_its_ending_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"memory.{name.upper()}"
    plot_memory(make_trace(layers=3), path)
    assert path.read_bytes().startswith(MAGIC[name])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("count", [1, 2])
def test_memory_of_a_very_short_step(count: int) -> None:
    trace = make_trace(layers=1)
    assert render(plot_memory(dataclasses.replace(trace, curve=trace.curve[:count])), "png").startswith(MAGIC["png"])


def test_memory_without_anything_live() -> None:
    empty = CurveSample(0, "forward", 0, 0, 0, 0, 0, 0, 0)
    trace = dataclasses.replace(make_trace(layers=1), curve=(empty,))
    with pytest.raises(InputError, match="no memory curve"):
        plot_memory(trace)
    with pytest.raises(InputError, match="no memory curve"):
        plot_memory(dataclasses.replace(trace, curve=()))


def test_plan_without_chunks_is_refused() -> None:
    with pytest.raises(InputError, match="no chunks"):
        plot_plan(dataclasses.replace(make_plan(1), chunks=(), order=()))


def test_nothing_is_written_for_a_bad_ending(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        plot_plan(make_plan(1), tmp_path / "plan.gif")
    assert list(tmp_path.iterdir()) == []


def legend_of(axes: Any) -> list[tuple[str, Any]]:
    """Texts and colours."""
    legend = axes.get_legend()
    texts = [text.get_text() for text in legend.get_texts()]
    return list(zip(texts, (patch.get_facecolor() for patch in legend.get_patches()), strict=True))


@pytest.mark.parametrize(
    "trace", [make_trace(checkpoint=False, layers=3), make_trace(layers=24)], ids=["plain", "step"]
)
def test_memory_is_a_stack_of_the_curve_with_its_phases_and_its_peak(trace: StepTrace) -> None:
    (axes,) = plot_memory(trace).axes
    xs, curve = np.array(curve_positions(trace.curve)), trace.curve
    kinds = [(label, colour, np.array([sum(getattr(at, name) for name in names) for at in curve]) / GIB)
             for label, colour, names in STACK]  # fmt: skip
    assert len({colour for _, colour, _ in kinds}) == len(kinds)
    tops, peak = np.cumsum([values for *_, values in kinds], axis=0), int(np.argmax([at.total for at in curve]))
    for (_, colour, values), top, band in zip(kinds, tops, axes.collections, strict=True):
        points = {tuple(point) for point in band.get_paths()[0].vertices.round(6)}
        for height in (top - values, top):
            assert points >= {tuple(point) for point in np.stack([xs, height], axis=1).round(6)}
        assert same_color(band.get_facecolor()[0], colour)
    for (text, colour), (label, expected, values) in zip(legend_of(axes), kinds[::-1], strict=True):
        assert text == f"{label}  {gib(values[peak])}"
        assert same_color(colour, expected)
    tones: dict[str, set[Any]] = {}
    for x, before in zip(xs[1:], xs, strict=False):
        (strip,) = [
            patch for patch in axes.patches if patch.get_x() < (x + before) / 2 < patch.get_x() + patch.get_width()
        ]
        tones.setdefault(curve[int(np.searchsorted(xs, x))].phase, set()).add(strip.get_facecolor())
    assert all(len(found) == 1 for found in tones.values())
    assert len(set.union(*tones.values())) == len(tones) - 1  # forward and step are alike
    phases = ["backward" if at.phase == "recompute" else at.phase for at in curve]
    turns = [x for x, (one, other) in zip(xs, pairwise(phases), strict=False) if one != other]
    assert [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2] == turns
    marked = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    assert marked[-1] == (xs[peak], pytest.approx(tops[-1][peak]))
    *named, note = axes.texts
    for text, (low, high) in zip(named, pairwise([xs[0], *turns, xs[-1]]), strict=True):
        phase = phases[int(np.searchsorted(xs, text.get_position()[0]))]
        assert text.get_position()[0] == pytest.approx((low + high) / 2)
        assert text.get_text().split()[0] == {"optimizer": "step"}.get(phase, phase)
    assert note.xy == marked[-1]
    assert note.get_ha() == ("left" if xs[peak] < np.mean(axes.get_xlim()) else "right")
    assert f"peak {gib(tops[-1][peak])} GiB in " in note.get_text()
    assert shorten(trace.peak_module, 44) in note.get_text()
    if curve[peak].phase == "optimizer":
        before = max((at.total, -x) for x, at in zip(xs, curve, strict=True) if at.phase != "optimizer")
        assert marked[0] == (-before[1], pytest.approx(before[0] / GIB))
        assert f"before it {gib(before[0] / GIB)} GiB in backward" in note.get_text()
    assert (axes.get_xlim(), axes.get_ylim()[0]) == ((xs[0], xs[-1]), 0)
    assert tops[-1][peak] < 0.75 * axes.get_ylim()[1]


@pytest.mark.parametrize("count", [4, 24, 100])
def test_a_plan_is_drawn_with_all_its_bytes_and_every_colour_has_its_name(count: int) -> None:
    plan = make_plan(count, frozen=0.25)
    disk, *rest = plan.chunks
    units = tuple(Unit(f"layer.{at}", "plain", "Layer", "one") for at in range(3))
    ways = tuple(UnitActivations(unit.name, () if at else None) for at, unit in enumerate(units))
    order = (dataclasses.replace(plan.order[0], chunks=(2,)), *plan.order[1:-1])  # never of the first
    plan = dataclasses.replace(
        plan,
        chunks=(dataclasses.replace(disk, state_home="disk"), *rest),
        order=order,
        step=dataclasses.replace(plan.step, units=units, activations=ways),
    )
    *budgets, cells, strip = plot_plan(plan).axes
    predicted = plan.predicted
    memories = [
        (predicted.device_parts, predicted.device_peak_bytes, plan.device_budget_bytes),
        (predicted.host_parts, predicted.host_peak_bytes, plan.host_budget_bytes),
        ({"optimizer_states": predicted.disk_peak_bytes}, predicted.disk_peak_bytes, plan.disk_budget_bytes),
    ]
    for axes, (parts, peak, budget) in zip(budgets, memories, strict=True):
        sizes = {name: size / GIB for name, size in sorted(parts.items(), key=lambda part: -part[1]) if size}
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([*sizes.values()])
        lefts = [0.0, *accumulate(sizes.values())]
        assert [bar.get_x() for bar in axes.patches] == pytest.approx(lefts[:-1])
        colours = [bar.get_facecolor() for bar in axes.patches]
        texts = [f"{part_label(name)} {gib(size)}" for name, size in sizes.items()]
        assert len(set(colours)) == len(colours)
        assert (legend_of(axes) if texts else []) == list(zip(texts, colours, strict=True))
        assert axes.lines[0].get_xdata() == [budget / GIB] * 2
        assert axes.get_xlim()[1] >= max(budget, peak) / GIB
        assert axes.texts[0].get_text() == f"{gib(peak / GIB)} of {gib(budget / GIB)} GiB"
    chunks = [plan.chunks[at] for at in (2, 1, *range(3, count), 0)]
    widths = [chunk.weight_bytes / GIB for chunk in chunks]
    lefts = [0.0, *accumulate(widths)]
    for bottom, colours in (
        (1.0, [HOME_COLOURS[chunk.weight_home] for chunk in chunks]),
        (0.0, [HOME_COLOURS[chunk.state_home] if chunk.trainable else PALE for chunk in chunks]),
    ):
        bars = [bar for bar in cells.patches if bar.get_y() == bottom]
        assert [(bar.get_x(), bar.get_width()) for bar in bars] == list(zip(lefts, widths, strict=False))
        assert all(same_color(bar.get_facecolor(), each) for bar, each in zip(bars, colours, strict=True))
    caps = [bar.get_x() for bar in cells.patches if bar.get_y() > 1]
    assert caps == [left for left, chunk in zip(lefts, chunks, strict=False) if chunk.resident]
    names = {f"on the {home}": colour for home, colour in HOME_COLOURS.items()}
    names |= {"resident all step": DARK, "frozen: no states": PALE}
    used = {bar.get_facecolor() for bar in cells.patches}
    assert {colour for _, colour in legend_of(cells)} == used
    assert all(same_color(colour, names[text]) for text, colour in legend_of(cells))
    assert (
        f"{count} chunks, {plan.block_count} rCache blocks of {gib(plan.block_bytes / GIB)}"
        in cells.texts[0].get_text()
    )
    kept = [bar.get_facecolor() for bar in strip.patches]
    assert legend_of(strip) == [("keep everything", kept[0]), ("keep nothing", kept[1])]
    assert kept[1] == kept[2]
    for axes in (cells, strip):
        assert axes.get_xlim() == (0, pytest.approx(max(bar.get_x() + bar.get_width() for bar in axes.patches)))


def test_cells_of_many_chunks_have_thinner_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps: list[float] = []
    monkeypatch.setattr(Axes, "bar", lambda axes, *bars, **look: gaps.append(look["linewidth"]))
    for count, gap in ((60, 0.5), (61, 0.2), (200, 0.2), (201, 0.08)):
        gaps.clear()
        plot_plan(make_plan(count))
        assert set(gaps) == {gap, 0, 0.4}  # of cells, of caps over the resident, and of budgets


def test_amounts_and_names_are_short() -> None:
    amounts = {0: "0", 0.0004: "<0.001", 0.0123: "0.012", 1.5: "1.50", 12.34: "12.3", 1301.2: "1301"}
    assert {amount: gib(amount) for amount in amounts} == amounts
    assert shorten("model.layers.31.mlp", 11) == "model\u20261.mlp"
    assert (shorten("0123456789", 10), len(shorten("x" * 11, 10))) == ("0123456789", 10)
