"""Adam for shards and whole models: the rule, the moments, the step, compiled or not."""

from __future__ import annotations

from elixir.kernels.adam.compiled import Background, Combination, missing_compiler
from elixir.kernels.adam.eager import fused_step
from elixir.kernels.adam.hybrid import HybridAdam
from elixir.kernels.adam.moments import Moments, States, make_moments, read_moments, write_moments
from elixir.kernels.adam.of_class import Kept, can_step_like, step_like, step_out_of_place_like
from elixir.kernels.adam.rule import AdamOptions, adam_, adam_rule, adam_scalars, group_options
from elixir.kernels.adam.step import COPIED, ONE_PASS, adam_step, adam_step_out_of_place
from elixir.kernels.adam.when_compiled import absent_kernels, begin_kernel

__all__ = [
    "COPIED",
    "ONE_PASS",
    "AdamOptions",
    "Background",
    "Combination",
    "HybridAdam",
    "Kept",
    "Moments",
    "States",
    "absent_kernels",
    "adam_",
    "adam_rule",
    "adam_scalars",
    "adam_step",
    "adam_step_out_of_place",
    "begin_kernel",
    "can_step_like",
    "fused_step",
    "group_options",
    "make_moments",
    "missing_compiler",
    "read_moments",
    "step_like",
    "step_out_of_place_like",
    "write_moments",
]
