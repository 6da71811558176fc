"""Pictures: what they show, in which formats, and that they leave matplotlib as they found it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from elixir.errors import InputError
from elixir.show.memory_curve import plot_memory
from elixir.show.plan_map import HOME_COLOURS, order_of_use, plot_plan
from elixir.show.style import render
from elixir.step_trace import CurveSample
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


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(MAGIC))
def test_the_same_data_give_the_same_bytes(name: str) -> None:
    plan = make_plan(5)
    assert render(plot_plan(plan), name) == render(plot_plan(plan), name)


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


def test_plan_colours_follow_the_homes() -> None:
    from matplotlib.colors import to_hex

    plan = make_plan(10)
    cells = plot_plan(plan).axes[2]
    colours = [to_hex(bar.get_facecolor()).upper() for bar in cells.patches if bar.get_y() == 1.0]
    assert colours == [HOME_COLOURS[plan.chunks[index].weight_home].upper() for index in order_of_use(plan)]


def test_plan_without_chunks_is_refused() -> None:
    with pytest.raises(InputError, match="no chunks"):
        plot_plan(dataclasses.replace(make_plan(1), chunks=(), order=()))


def test_nothing_is_written_for_a_bad_ending(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        plot_plan(make_plan(1), tmp_path / "plan.gif")
    assert list(tmp_path.iterdir()) == []
