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


def assert_early_states_are_kept_unless_clipped(rows: list[dict[str, Any]]) -> None:
    """Rows of a rehearsed offload pair say what became of states that the host made before the norm was known."""
    ours = [row for row in rows if row["part"] == "offload" and row["contender"] == "elixir" and row["status"] == "ok"]
    clipped = [row for row in ours if row["case"].endswith("clipped in every step")]
    others = [row for row in ours if row["max_norm"] == 1e3 and row["host_state_chunks"]]
    assert clipped
    assert others
    for row in clipped:
        assert row["early_states_kept"] == 0
        assert row["clipped_steps"] == row["steps"]
        # An early update of the warm-up may end while the first timed step runs: CPU Adam does not wait for reports.
        assert set(row["host_adam_forms"]) <= {"in pieces", "one pass"}
        assert row["host_adam_forms"].get("one pass", 0) <= row["host_state_chunks"]
    for row in others:
        assert row["early_states_kept"] == row["early_states_made"] > 0
        assert row["clipped_steps"] == 0
        assert set(row["host_adam_forms"]) == {"one pass"}
        assert row["grad_norm_range"][1] < 1e3
    for row in ours:
        assert {"host_adam", "fetch"} <= set(row["waited_s_per_step"]) == set(row["stream_waited_s_per_step"])
        assert row["busy_s_per_step"]["host_adam"] > 0
