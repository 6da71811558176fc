"""Questions asked of a planner: sweep, explain, bottlenecks."""

from __future__ import annotations

from elixir.search.whatif.bottlenecks import faster, lever_effects
from elixir.search.whatif.explain import NEGLIGIBLE_SHARE, Change, ChunkReasons, Explanation, Spot
from elixir.search.whatif.sweep import doublings, fit
from elixir.search.whatif.trial import HOST_PER_DEVICE_BYTE, SweepRow, budgets_on_paper, with_network

__all__ = [
    "HOST_PER_DEVICE_BYTE",
    "NEGLIGIBLE_SHARE",
    "Change",
    "ChunkReasons",
    "Explanation",
    "Spot",
    "SweepRow",
    "budgets_on_paper",
    "doublings",
    "faster",
    "fit",
    "lever_effects",
    "with_network",
]
