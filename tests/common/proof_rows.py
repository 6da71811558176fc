"""Rows as the proof writes them, with what its verdicts read."""

from __future__ import annotations

from typing import Any


def memory_row(case: str, percent: float) -> dict[str, Any]:
    return {
        "part": "memory", "case": case, "contender": "plain", "status": "ok", "backward_percent": percent,
        "step_percent": 0.0, "measured_step_bytes": 2**30, "measured_reserved_bytes": 2**30,
    }  # fmt: skip


def speed_row(contender: str, tokens_per_s: float, part: str = "offload", **more: Any) -> dict[str, Any]:
    return {
        "part": part, "case": "pair", "contender": contender, "status": "ok", "model": "m", "kind": contender.split()[0],
        "tokens_per_s": tokens_per_s, "tokens_per_step": 64, "budget_bytes": 100, "without_states_bytes": 500,
        "resident_bytes": 900, "host_state_chunks": 1, "p20_s": 1.0, "p50_s": 1.0, "p80_s": 1.0, **more,
    }  # fmt: skip
