"""Observations as a run would have made them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elixir.plan.plan import Plan
from elixir.search.replan import Observation


def steady(plan: Plan, **changes: Any) -> Observation:
    """The observation of a run in which everything went as predicted."""
    predicted = plan.predicted
    seen = Observation(
        step_s=predicted.seconds["total"],
        busy_s={"fetch": 0.0, "offload": 0.0, "host_adam": 0.0, "refresh": 0.0},
        fetched_bytes=predicted.moved_bytes["host_to_device"],
        refreshed_bytes=0,
        offloaded_bytes=predicted.moved_bytes["device_to_host"],
        device_peak_bytes=predicted.device_peak_bytes,
        host_peak_bytes=predicted.host_step_bytes,
    )
    return replace(seen, **changes)
