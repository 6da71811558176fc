"""Who reads which weight when: the one interception that tracer and runtime listen to."""

from __future__ import annotations

from elixir.access.autograd import (
    backward_is_running,
    current_node_number,
    detached,
    hooks_were_refused,
    innermost_saved_tensors_hooks,
)
from elixir.access.functions import RENORMALISE, REPLACES_MEMORY, operator_reads_only_metadata
from elixir.access.interception import (
    TRACKED_PARAMETERS,
    CountedParameter,
    ParameterAccess,
    TrackedParameter,
    TrackedView,
    untrack,
)
from elixir.access.placeholders import absent, is_absent, storage_of, unmarked

__all__ = [
    "RENORMALISE",
    "REPLACES_MEMORY",
    "TRACKED_PARAMETERS",
    "CountedParameter",
    "ParameterAccess",
    "TrackedParameter",
    "TrackedView",
    "absent",
    "backward_is_running",
    "current_node_number",
    "detached",
    "hooks_were_refused",
    "innermost_saved_tensors_hooks",
    "is_absent",
    "operator_reads_only_metadata",
    "storage_of",
    "unmarked",
    "untrack",
]
