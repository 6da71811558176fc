"""``elixir show | compare | models``: what is known already. None imports torch, which takes seconds."""

from __future__ import annotations

import argparse

from elixir.cli import files, output
from elixir.cli.hardware import say_hardware
from elixir.hardware.profile import HardwareProfile
from elixir.models.model_shape import describe, model_names
from elixir.plan.plan import Plan
from elixir.show import tables
from elixir.step_trace import StepTrace


def run_show(args: argparse.Namespace) -> int:
    """Shows any saved artifact."""

    artifact = files.load(args.file)
    if args.json:
        output.say_json(tables.record_of(artifact))
    elif isinstance(artifact, StepTrace):
        say_trace(artifact)
    elif isinstance(artifact, HardwareProfile):
        say_hardware(artifact)
    elif isinstance(artifact, Plan):
        output.say(str(artifact))
        say_parts(artifact)
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Two artifacts of one kind side by side."""

    a, b = files.load(args.a), files.load(args.b)
    rows = tables.compare(a, b)
    moved = tables.moved_parameters(a, b) if isinstance(a, Plan) and isinstance(b, Plan) else None
    if args.json:
        fields = {row.name: {"a": row.a, "b": row.b, "differs": row.differs} for row in rows}
        extra = {} if moved is None else {"placed_differently": list(moved)}
        output.say_json({"a": args.a, "b": args.b, "fields": fields, **extra})
        return 0
    output.say_tables(tables.comparison_table(f"{args.a} and {args.b}", "a", "b", rows))
    differing = sum(row.differs for row in rows)
    output.say(f"{differing} of {len(rows)} fields differ" + ("" if moved is None else _moved_line(moved)))
    return 0


def run_models(args: argparse.Namespace) -> int:
    """The models known by name."""

    shapes = [describe(name) for name in model_names()]
    if args.json:
        sized = (
            "parameters",
            "source",
            "family",
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "ffn",
            "vocabulary",
            "positions",
        )
        output.say_json({shape.name: {key: getattr(shape, key) for key in (*sized, "config")} for shape in shapes})
        return 0
    sizes = ("layers", "hidden", "heads", "ffn", "positions")
    rows = []
    for shape in shapes:
        shown = [tables.show_value(key, getattr(shape, key)) for key in sizes]
        rows.append([shape.name, f"{(shape.parameters or 0) / 1e9:,.3f} B", *shown])
    output.say_tables(tables.list_table("models known by name", ("name", "parameters", *sizes), rows))
    return 0


def say_parts(plan: Plan) -> None:
    """The memory of a plan and its chunks, by what they hold and where they live."""
    judged = [tables.scenarios_table(plan)] if plan.predicted.judgements else []
    kept = [tables.activations_table(plan)] if plan.activations else []
    output.say_tables(tables.parts_table(plan), tables.homes_table(plan), *kept, *judged)


def say_trace(trace: StepTrace, *, brief: bool = False) -> None:
    """The memory profile of a step: totals, where the peak is, what is alive there, and what was assumed."""
    output.say(tables.trace_summary(trace))
    if not brief:
        output.say_tables(tables.memory_table(trace), tables.contributors_table(trace))
    for label, names in (
        ("unused parameters", trace.unused_parameters),
        ("modules that never ran", trace.unused_modules),
    ):
        if names:
            output.say(f"{label}: {len(names)}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
    for assumption in trace.assumptions:
        output.say(f"assumed: {assumption}")


def _moved_line(moved: tuple[str, ...]) -> str:
    if not moved:
        return "; every parameter has the same homes in both"
    names = ", ".join(moved[:5]) + (", ..." if len(moved) > 5 else "")
    return f"; {len(moved)} parameters are placed differently: {names}"
