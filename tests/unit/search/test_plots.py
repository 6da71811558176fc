"""Pictures: what they show, in which formats, and that they leave matplotlib as they found it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from elixir.errors import InputError
from elixir.show.memory_curve import plot_memory
from elixir.show.plan_map import HOME_COLOURS, order_of_use, plot_plan
from elixir.show.style import gib, picture_format, render, shorten
from elixir.step_trace import CurveSample
from elixir.units import GIB
from example.profile_activation import plot_activations
from tests.common.samples import make_plan, make_trace

MAGIC = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}


def texts(figure: object) -> str:
    """All text of a figure that is not hidden."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text) if text.get_visible())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", list(MAGIC))
def test_each_format_is_what_its_ending_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"memory.{name.upper()}"
    plot_memory(make_trace(layers=3), path)
    assert path.read_bytes().startswith(MAGIC[name])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["a", "a.jpg", "png", "a.png.gz", "", ".png/"])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"\.png, \.pdf or \.svg"):
        picture_format(name)


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(MAGIC))
def test_the_same_data_give_the_same_bytes(name: str) -> None:
    plan = make_plan(5)
    assert render(plot_plan(plan), name) == render(plot_plan(plan), name)


def test_memory_names_the_peak_and_stacks_up_to_it() -> None:
    trace = make_trace(checkpoint=False, layers=3)
    figure = plot_memory(trace)
    shown = texts(figure)
    assert f"peak {gib(trace.step_peak_bytes / GIB)} GiB in backward" in shown
    assert trace.peak_module in shown
    for phase in ("forward", "backward", "step"):
        assert phase in shown
    # The layers of the stack end at the highest total of the curve.
    (axes,) = figure.axes
    top = max(
        path.vertices[:, 1].max() for band in axes.collections for path in band.get_paths() if len(band.get_paths())
    )
    assert max(top, 0) == pytest.approx(max(sample.total for sample in trace.curve) / GIB, rel=1e-6)


def test_memory_says_when_the_optimizer_sets_the_peak() -> None:
    assert "in the optimizer step" in texts(plot_memory(make_trace(layers=24, checkpoint=True)))


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


@pytest.mark.parametrize("count", [1, 3, 24, 300])
def test_plan_draws_every_chunk_in_both_lanes(count: int) -> None:
    plan = make_plan(count, frozen=0.25)
    figure = plot_plan(plan)
    device, host, cells = figure.axes
    weights = [bar for bar in cells.patches if bar.get_y() == 1.0]
    states = [bar for bar in cells.patches if bar.get_y() == 0.0]
    assert len(weights) == len(states) == count
    total = sum(chunk.weight_bytes for chunk in plan.chunks)
    assert sum(bar.get_width() for bar in weights) == pytest.approx(total / GIB)
    for axes, peak_bytes in ((device, plan.predicted.device_peak_bytes), (host, plan.predicted.host_peak_bytes)):
        assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(peak_bytes / GIB)


def test_plan_colours_follow_the_homes() -> None:
    from matplotlib.colors import to_hex

    plan = make_plan(10)
    cells = plot_plan(plan).axes[2]
    colours = [to_hex(bar.get_facecolor()).upper() for bar in cells.patches if bar.get_y() == 1.0]
    assert colours == [HOME_COLOURS[plan.chunks[index].weight_home].upper() for index in order_of_use(plan)]


def test_chunks_come_in_order_of_first_use_and_none_is_lost() -> None:
    plan = make_plan(4)
    uses = tuple(dataclasses.replace(use, chunks=(chunk,)) for use, chunk in zip(plan.order, (2, 0, 2), strict=False))
    assert order_of_use(dataclasses.replace(plan, order=uses)) == [2, 0, 1, 3]


def test_plan_with_nothing_on_the_host() -> None:
    plan = make_plan(2, resident=1.0)
    predicted = dataclasses.replace(plan.predicted, host_parts={}, host_peak_bytes=0)
    figure = plot_plan(dataclasses.replace(plan, predicted=predicted, host_budget_bytes=0))
    assert render(figure, "svg")


def test_plan_without_chunks_is_refused() -> None:
    with pytest.raises(InputError, match="no chunks"):
        plot_plan(dataclasses.replace(make_plan(1), chunks=(), order=()))


def test_activations_draw_one_line_per_model() -> None:
    traces = [make_trace(name, 3, checkpoint=c) for name in ("small", "large") for c in (False, True)]
    (axes,) = plot_activations(traces).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["small", "large"]
    with pytest.raises(InputError, match="at least one"):
        plot_activations([])


def test_nothing_is_written_for_a_bad_ending(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        plot_plan(make_plan(1), tmp_path / "plan.gif")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "0"), (0.0004, "<0.001"), (0.0123, "0.012"), (1.5, "1.50"), (12.34, "12.3"), (1301.2, "1301")],
)
def test_amounts(amount: float, shown: str) -> None:
    assert gib(amount) == shown


def test_shortened_names_keep_both_ends() -> None:
    assert shorten("short", 10) == "short"
    assert shorten("model.layers.31.mlp", 11) == "model…1.mlp"
    assert len(shorten("x" * 100, 20)) == 20


def test_pictures_leave_pyplot_and_settings_alone() -> None:
    code = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy()\n"
        "from elixir.show.style import render; from elixir.show.plan_map import plot_plan\n"
        "from tests.common.samples import make_plan\n"
        "figure = plot_plan(make_plan(3))\n"
        "render(figure, 'pdf')\n"
        "assert matplotlib.rcParams.copy() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env={"PYTHONPATH": str(root)}, timeout=60)
