"""From a model and a plan to chunks that hold its weights."""

from __future__ import annotations

from elixir.wrapper.build.chunks import (
    agree_on_plan,
    build_chunks,
    compute_device,
    move_chunks,
    place_buffers,
    warn_if_made_elsewhere,
)
from elixir.wrapper.build.initialise import OwnInitialisation
from elixir.wrapper.build.origins import Origins
from elixir.wrapper.build.shared_buffers import SharedBuffers
from elixir.wrapper.build.weights import Weights, check_weights, few

__all__ = [
    "Origins",
    "OwnInitialisation",
    "SharedBuffers",
    "Weights",
    "agree_on_plan",
    "build_chunks",
    "check_weights",
    "compute_device",
    "few",
    "move_chunks",
    "place_buffers",
    "warn_if_made_elsewhere",
]
