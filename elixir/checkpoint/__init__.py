"""Checkpoints of a run: model, optimizers, loss scale, random numbers and the user's state, sharded and crash-safe."""

from __future__ import annotations

from elixir.checkpoint.checkpoints import Checkpoints
from elixir.checkpoint.loading import load_checkpoint
from elixir.checkpoint.saving import Loaded, Saving, save_checkpoint
from elixir.checkpoint.user_state import PerRank

__all__ = ["Checkpoints", "Loaded", "PerRank", "Saving", "load_checkpoint", "save_checkpoint"]
