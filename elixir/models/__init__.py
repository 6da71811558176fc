"""Models by name, config or function, on meta, with a default training step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elixir.models.activation_checkpointing import CHECKPOINT_FORMS, checkpointable_layers, parse_checkpoint
    from elixir.models.buffers import BufferPlace, buffer_places
    from elixir.models.casting import casts_buffers
    from elixir.models.loading import build, build_shape
    from elixir.models.model_fingerprint import fingerprint
    from elixir.models.plannable import compiled_over_moving_weights, refuse_compiled, refuse_unplannable
    from elixir.models.samples import generators_untouched, planning_batch
    from elixir.models.shapes import ModelShape, describe, find, model_names
    from elixir.models.shared_memory import SharedMemory, find_shared_memory
    from elixir.models.step import default_input, default_step, input_to_trace, refused_overflow

__all__ = [
    "CHECKPOINT_FORMS",
    "BufferPlace",
    "ModelShape",
    "SharedMemory",
    "buffer_places",
    "build",
    "build_shape",
    "casts_buffers",
    "checkpointable_layers",
    "compiled_over_moving_weights",
    "default_input",
    "default_step",
    "describe",
    "find",
    "find_shared_memory",
    "fingerprint",
    "generators_untouched",
    "input_to_trace",
    "model_names",
    "parse_checkpoint",
    "planning_batch",
    "refuse_compiled",
    "refuse_unplannable",
    "refused_overflow",
]

_MODULES = {
    "BufferPlace": "elixir.models.buffers",
    "buffer_places": "elixir.models.buffers",
    "CHECKPOINT_FORMS": "elixir.models.activation_checkpointing",
    "ModelShape": "elixir.models.shapes",
    "SharedMemory": "elixir.models.shared_memory",
    "build": "elixir.models.loading",
    "build_shape": "elixir.models.loading",
    "casts_buffers": "elixir.models.casting",
    "compiled_over_moving_weights": "elixir.models.plannable",
    "checkpointable_layers": "elixir.models.activation_checkpointing",
    "default_input": "elixir.models.step",
    "default_step": "elixir.models.step",
    "describe": "elixir.models.shapes",
    "find": "elixir.models.shapes",
    "fingerprint": "elixir.models.model_fingerprint",
    "generators_untouched": "elixir.models.samples",
    "input_to_trace": "elixir.models.step",
    "model_names": "elixir.models.shapes",
    "parse_checkpoint": "elixir.models.activation_checkpointing",
    "planning_batch": "elixir.models.samples",
    "refuse_compiled": "elixir.models.plannable",
    "refuse_unplannable": "elixir.models.plannable",
    "refused_overflow": "elixir.models.step",
    "find_shared_memory": "elixir.models.shared_memory",
}


def __getattr__(name: str) -> Any:
    """Loads a name on first use: shapes and flags are wanted without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
