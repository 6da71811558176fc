"""Weights in and out under the model's names: state dicts and gathered()."""

from __future__ import annotations

from elixir.wrapper.weights_io.gathered import shown
from elixir.wrapper.weights_io.shared_weights import SharedWeights
from elixir.wrapper.weights_io.state_dict import ModelState, in_use

__all__ = ["ModelState", "SharedWeights", "in_use", "shown"]
