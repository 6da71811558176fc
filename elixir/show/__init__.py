"""Tables and pictures of artifacts and of search results. It reads and decides nothing."""

from __future__ import annotations

from elixir.show.explanation import (
    blocks_table,
    elsewhere_table,
    explanation_record,
    kinds,
    levers_table,
    runs,
    summary_text,
)
from elixir.show.memory_curve import plot_activations, plot_memory
from elixir.show.perfetto import chrome_trace, save_chrome_trace
from elixir.show.plan_map import HOME_COLOURS, order_of_use, plot_plan
from elixir.show.style import FORMATS, gib, picture_format, render, save, shorten
from elixir.show.sweep import plot_sweep, reasons, sweep_table, to_frame
from elixir.show.tables import plan_record, record_of, show_value
from elixir.show.timeline import plot_timeline

__all__ = [
    "FORMATS",
    "HOME_COLOURS",
    "blocks_table",
    "chrome_trace",
    "elsewhere_table",
    "explanation_record",
    "gib",
    "kinds",
    "levers_table",
    "order_of_use",
    "picture_format",
    "plan_record",
    "plot_activations",
    "plot_memory",
    "plot_plan",
    "plot_sweep",
    "plot_timeline",
    "reasons",
    "record_of",
    "render",
    "runs",
    "save",
    "save_chrome_trace",
    "shorten",
    "show_value",
    "summary_text",
    "sweep_table",
    "to_frame",
]
