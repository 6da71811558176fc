"""Values that a trace knows although its tensors are on meta, and refusals to guess the others."""

from __future__ import annotations

from elixir.tracer.values.expert_choice import (
    CHOOSES,
    BalancedRouting,
    RecordedRouting,
    Routing,
    RoutingRecorder,
    choice_of,
)
from elixir.tracer.values.indexing import SELECTIONS, picked
from elixir.tracer.values.shadows import (
    CHECKS_FINITE,
    CONSTANTS_LIKE,
    MAX_EAGER_SHADOW_NUMEL,
    Shadows,
    snapshot,
    suppose_finite,
)
from elixir.tracer.values.unknowns import is_user_code, printable, undecidable, unknown_number, user_location

__all__ = [
    "CHECKS_FINITE",
    "CHOOSES",
    "CONSTANTS_LIKE",
    "MAX_EAGER_SHADOW_NUMEL",
    "SELECTIONS",
    "BalancedRouting",
    "RecordedRouting",
    "Routing",
    "RoutingRecorder",
    "Shadows",
    "choice_of",
    "is_user_code",
    "picked",
    "printable",
    "snapshot",
    "suppose_finite",
    "undecidable",
    "unknown_number",
    "user_location",
]
