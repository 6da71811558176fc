"""Questions asked of a planner: sweep, explain."""

from __future__ import annotations

from elixir.search.whatif.explain import NEGLIGIBLE_SHARE, ChunkReasons, Difference, Explanation, Spot
from elixir.search.whatif.sweep import doublings, fit
from elixir.search.whatif.trial import HOST_PER_DEVICE_BYTE, SweepRow, budgets_on_paper, with_network

__all__ = [
    "HOST_PER_DEVICE_BYTE",
    "NEGLIGIBLE_SHARE",
    "ChunkReasons",
    "Difference",
    "Explanation",
    "Spot",
    "SweepRow",
    "budgets_on_paper",
    "doublings",
    "fit",
    "with_network",
]
