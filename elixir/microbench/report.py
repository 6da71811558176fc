"""Measurements as tables for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch

from elixir.microbench.bench import today
from elixir.microbench.fitting import Measured
from elixir.units import format_seconds

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_rate(value: float, unit: str) -> str:
    """``1.5e9, bytes`` -> ``1.50 Gbytes/s``; decimal prefixes, as links are sold."""
    for scale, prefix in _SCALES:
        if value >= scale:
            return f"{value / scale:.2f} {prefix}{unit}/s"
    return f"{value:.2f} {unit}/s"


def as_table(results: Sequence[Measured]) -> str:
    """Lines for people: key, rate of large amounts, latency, error of the fit, what ran.

    With several ranks, the rate of each and of all together.
    """
    rows = [_row(result) for result in results]
    if not rows:
        return ""
    head = ("key", "rate", "latency", "fit within", "what ran")
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(4)]
    return "\n".join(
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{row[c]:>{widths[c]}}" for c in (1, 2, 3)), row[4]])
        for row in [head, *rows]
    )


def as_json(results: Sequence[Measured]) -> str:
    """JSON text with points, fits and problems, the date and what ran them."""
    record = {
        "measured_at": today(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "series": [_record(result) for result in results],
    }
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def _row(result: Measured) -> tuple[str, str, str, str, str]:
    if result.series is None:
        return result.key, "-", "-", "-", f"not measured: {result.problem}"
    rate = format_rate(result.per_s, result.series.unit)
    if result.series.ranks > 1 and result.key.endswith(".all_ranks"):
        rate += f" each, {format_rate(result.per_s * result.series.ranks, result.series.unit)} in all"
    if result.fit is None:
        return result.key, rate, "-", "no fit", f"{result.series.how} ({result.problem})"
    return result.key, rate, format_seconds(result.fit.latency_s), f"{result.fit.error:.0%}", result.series.how


def _record(result: Measured) -> dict[str, object]:
    record: dict[str, object] = {"key": result.key}
    if result.series is not None:
        record |= asdict(result.series)
    if result.fit is not None:
        fit = result.fit
        record["fit"] = {"latency_s": fit.latency_s, "per_s": fit.per_s, "error": fit.error}
    else:
        record["fit"] = None
        record["problem"] = result.problem
    return record
