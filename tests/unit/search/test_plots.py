"""Pictures: what they show, in which formats, and that they leave matplotlib as they found it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from elixir.errors import InputError
from elixir.show.memory_curve import plot_memory
from elixir.show.plan_map import plot_plan
from elixir.show.style import render
from elixir.step_trace import CurveSample
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
