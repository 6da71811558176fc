"""Fused parts of other people's models, per instance: norms, SwiGLU, loss."""

from __future__ import annotations

from elixir.kernels.model.cross_entropy import linear_cross_entropy, slice_columns
from elixir.kernels.model.deferred import DeferredLogits
from elixir.kernels.model.fused_modules import FusedKernels
from elixir.kernels.model.fused_ops import rms_norm, silu_mul
from elixir.kernels.model.registry import KINDS, PLAIN, choose

__all__ = [
    "KINDS",
    "PLAIN",
    "DeferredLogits",
    "FusedKernels",
    "choose",
    "linear_cross_entropy",
    "rms_norm",
    "silu_mul",
    "slice_columns",
]
