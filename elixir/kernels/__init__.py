"""The fused steps: Adam for shards and whole models, and a model's norms, SwiGLU blocks, rotations and loss."""

from elixir.kernels.adam import AdamOptions, adam_, adam_rule, adam_scalars
from elixir.kernels.cross_entropy import linear_cross_entropy
from elixir.kernels.fused_modules import FusedKernels
from elixir.kernels.fused_ops import rms_norm, silu_mul
from elixir.kernels.hybrid_adam import HybridAdam
from elixir.kernels.moments import Moments, make_moments, read_moments
from elixir.kernels.registry import choose
from elixir.kernels.step import adam_step
from elixir.moments import state_bytes

__all__ = [
    "AdamOptions",
    "FusedKernels",
    "HybridAdam",
    "Moments",
    "adam_",
    "adam_rule",
    "adam_scalars",
    "adam_step",
    "choose",
    "linear_cross_entropy",
    "make_moments",
    "read_moments",
    "rms_norm",
    "silu_mul",
    "state_bytes",
]
