"""One optimizer step: inputs, norm, updates per chunk."""

from __future__ import annotations

from elixir.wrapper.step.elementwise import MODES, check_elementwise, options_of
from elixir.wrapper.step.fused_states import FusedStates
from elixir.wrapper.step.inputs import cast_inputs
from elixir.wrapper.step.norm import total_norm
from elixir.wrapper.step.stepper import Stepper
from elixir.wrapper.step.user_class import check_optimizer, copies_states, take_options
from elixir.wrapper.step.whole_states import load_whole_states, whole_states

__all__ = [
    "MODES",
    "FusedStates",
    "Stepper",
    "cast_inputs",
    "check_elementwise",
    "check_optimizer",
    "copies_states",
    "load_whole_states",
    "options_of",
    "take_options",
    "total_norm",
    "whole_states",
]
