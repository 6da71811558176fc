"""The problem as pure data and bytes: packing, the packed step, memory, traffic. It knows no seconds."""

from __future__ import annotations

from elixir.search.problem.bytes_moved import Traffic, traffic
from elixir.search.problem.from_plan import placement_of, setting_of, workload_of
from elixir.search.problem.memory import MemoryModel, MemoryNeed
from elixir.search.problem.packed_step import StepFacts, Workload
from elixir.search.problem.packing import (
    GRID_REACH,
    MIN_CHUNK_BYTES,
    Ints,
    Packing,
    ParamTable,
    minimum_waste_size,
    round_up,
    search_grid,
)
from elixir.search.problem.placement import (
    DISK,
    EARLY,
    HOMES,
    RESIDENT,
    STATES,
    WEIGHTS,
    Bools,
    Codes,
    Floats,
    Placement,
    Setting,
    Spill,
)

__all__ = [
    "DISK",
    "EARLY",
    "GRID_REACH",
    "HOMES",
    "MIN_CHUNK_BYTES",
    "RESIDENT",
    "STATES",
    "WEIGHTS",
    "Bools",
    "Codes",
    "Floats",
    "Ints",
    "MemoryModel",
    "MemoryNeed",
    "Packing",
    "ParamTable",
    "Placement",
    "Setting",
    "Spill",
    "StepFacts",
    "Traffic",
    "Workload",
    "minimum_waste_size",
    "placement_of",
    "round_up",
    "search_grid",
    "setting_of",
    "traffic",
    "workload_of",
]
