"""Elixir plans and runs the training of large models on few GPUs.

What a step needs is a `StepTrace`, what a machine can do a `HardwareProfile`, what goes where and when a `Plan`.
Names are loaded on first use, so that ``import elixir`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elixir.api import wrap
    from elixir.errors import ArtifactError, ElixirError, InputError, InputTypeError, PlanError, StateError, TraceError
    from elixir.hardware import HardwareProfile
    from elixir.plan import ChunkPlan, Plan
    from elixir.tracer.step_trace import StepTrace

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "ChunkPlan",
    "ElixirError",
    "HardwareProfile",
    "InputError",
    "InputTypeError",
    "Plan",
    "PlanError",
    "StateError",
    "StepTrace",
    "TraceError",
    "__version__",
    "wrap",
]

_HOMES = {
    "ArtifactError": "elixir.errors",
    "ChunkPlan": "elixir.plan",
    "ElixirError": "elixir.errors",
    "HardwareProfile": "elixir.hardware",
    "InputError": "elixir.errors",
    "InputTypeError": "elixir.errors",
    "Plan": "elixir.plan",
    "PlanError": "elixir.errors",
    "StateError": "elixir.errors",
    "StepTrace": "elixir.tracer.step_trace",
    "TraceError": "elixir.errors",
    "wrap": "elixir.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elixir' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
