"""`Plan`: what goes where, and when. `chunk_plan` has a chunk's part of it, `traffic` the bytes that its steps move."""

from __future__ import annotations

from elixir.plan.chunk_plan import (
    PARAM_ALIGNMENT_BYTES,
    ChunkPlan,
    ChunkUse,
    Home,
    Memory,
    ParamSlot,
    Phase,
    alignment_bytes,
)
from elixir.plan.plan import (
    CHECKPOINT_PART,
    DISK_LINKS,
    LINKS,
    PASSAGE_BUFFERS,
    STAGING_BUFFERS,
    WINDOW_CHUNKS,
    HasPlan,
    Judgement,
    Plan,
    PlanPrediction,
    plan_of,
    range_text,
    same_packing,
)
from elixir.plan.traffic import Backwards, ChunkRoute, StepTraffic, step_traffic

__all__ = [
    "CHECKPOINT_PART",
    "DISK_LINKS",
    "LINKS",
    "PARAM_ALIGNMENT_BYTES",
    "PASSAGE_BUFFERS",
    "STAGING_BUFFERS",
    "WINDOW_CHUNKS",
    "Backwards",
    "ChunkPlan",
    "ChunkRoute",
    "ChunkUse",
    "HasPlan",
    "Home",
    "Judgement",
    "Memory",
    "ParamSlot",
    "Phase",
    "Plan",
    "PlanPrediction",
    "StepTraffic",
    "alignment_bytes",
    "plan_of",
    "range_text",
    "same_packing",
    "step_traffic",
]
