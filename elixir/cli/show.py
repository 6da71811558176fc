"""``elixir show | compare | models``: what is known already. None imports torch, which takes seconds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elixir.artifact import Artifact
from elixir.cli import files
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.models.model_shape import describe, model_names
from elixir.plan.plan import Plan
from elixir.show import tables
from elixir.show.records import compare, comparison_table, hardware_shown, moved_parameters, record_of, show_value
from elixir.step_trace import StepTrace

if TYPE_CHECKING:
    from elixir.cli.output import Said


def run_show(args: argparse.Namespace) -> Iterator[Said]:
    """Shows any saved artifact."""
    artifact = files.load(args.file, Artifact)
    if args.json:
        yield record_of(artifact)
    elif isinstance(artifact, StepTrace):
        yield from tables.trace_shown(artifact)
    elif isinstance(artifact, HardwareProfile):
        yield from hardware_shown(artifact)
    elif isinstance(artifact, Plan):
        yield str(artifact)
        yield from tables.plan_tables(artifact)


def run_compare(args: argparse.Namespace) -> Iterator[Said]:
    """Two artifacts of one kind side by side, their speeds and prices first."""
    a, b = files.load(args.a, Artifact), files.load(args.b, Artifact)
    rows = compare(a, b, [_costs(each, args.prices) for each in (a, b)])
    moved = moved_parameters(a, b) if isinstance(a, Plan) and isinstance(b, Plan) else None
    if args.json:
        fields = {name: {"a": left, "b": right, "differs": left != right} for name, left, right in rows}
        yield {"a": args.a, "b": args.b, "fields": fields, **({} if moved is None else {"placed_differently": moved})}
        return
    yield comparison_table(f"{args.a} and {args.b}", rows)
    text = f"{sum(left != right for _, left, right in rows)} of {len(rows)} fields differ"
    if moved is not None:
        names = ", ".join(moved[:5]) + (", ..." if len(moved) > 5 else "")
        same = "every parameter has the same homes in both"
        text += "; " + (f"{len(moved)} parameters are placed differently: {names}" if moved else same)
    yield text


def _costs(artifact: Artifact, path: str | None) -> dict[str, Any]:
    """The cost of a plan by a price file; empty without one."""
    if path is None:
        return {}
    from elixir.search.whatif.prices import Prices
    from elixir.search.whatif.sweep_row import SweepRow

    if not isinstance(artifact, Plan):
        raise InputError("--prices goes with two plans")
    prices, size = Prices.read(path), (artifact.step.samples or 1, artifact.step.seq, artifact.dtype)
    budgets = artifact.device_budget_bytes, artifact.host_budget_bytes
    row = SweepRow(artifact.model_name, artifact.hardware_name, artifact.world_size, *size, True, "", *budgets)
    cost = prices.cost(replace(row, tokens_per_s=artifact.tokens_per_s))
    names = (f"{prices.currency} an hour", f"{prices.currency} a million tokens")
    return dict(zip(names, (None, None) if cost is None else (cost.per_hour, cost.per_million), strict=True))


def run_models(args: argparse.Namespace) -> Iterator[Said]:
    """The models known by name."""
    shapes = [describe(name) for name in model_names()]
    sizes = ("layers", "hidden", "heads", "ffn", "positions")
    if args.json:
        more = ("parameters", "source", "family", "kv_heads", "vocabulary", "config")
        yield {shape.name: {key: getattr(shape, key) for key in (*more, *sizes)} for shape in shapes}
        return
    rows = []
    for shape in shapes:
        shown = [show_value(key, getattr(shape, key)) for key in sizes]
        rows.append([shape.name, f"{(shape.parameters or 0) / 1e9:,.3f} B", *shown])
    yield tables.list_table("models known by name", ("name", "parameters", *sizes), rows)
