"""The fused steps: Adam for shards and whole models, and a model's norms, SwiGLU blocks, rotations and loss."""

from elixir.kernels.adam import (
    AdamOptions,
    HybridAdam,
    Moments,
    adam_,
    adam_rule,
    adam_scalars,
    adam_step,
    make_moments,
    read_moments,
)
from elixir.kernels.model import FusedKernels, choose, linear_cross_entropy, rms_norm, silu_mul
from elixir.optimizer_states import state_bytes

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
