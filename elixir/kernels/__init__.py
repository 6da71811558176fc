"""The fused steps: Adam for shards and for whole models."""

from elixir.kernels.adam import AdamOptions, adam_, adam_rule, adam_scalars
from elixir.kernels.hybrid_adam import HybridAdam
from elixir.kernels.moments import Moments, make_moments, read_moments, state_bytes
from elixir.kernels.step import adam_step

__all__ = [
    "AdamOptions",
    "HybridAdam",
    "Moments",
    "adam_",
    "adam_rule",
    "adam_scalars",
    "adam_step",
    "make_moments",
    "read_moments",
    "state_bytes",
]
