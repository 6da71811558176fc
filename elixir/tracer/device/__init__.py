"""Rules that make meta tensors behave as on the target device: attention, autocast, allocator, sums of gradients."""

from __future__ import annotations

from elixir.tracer.device.attention_choice import Attention
from elixir.tracer.device.autocast import ASKED_BY_DEVICE, Autocast, autocast_asked_for_meta, warnings_heard
from elixir.tracer.device.autograd_in_place import (
    WRITES_IN_PLACE,
    accumulates_in_place,
    references_when_alone,
    writes_in_place,
)
from elixir.tracer.device.meta_kernels import LENGTHS_IN_TENSORS
from elixir.tracer.device.routed_functions import routed
from elixir.tracer.device.target import CudaTarget, OptimizerKernel, Target, target_for
from elixir.tracer.device.value_branches import asks_for_nan

__all__ = [
    "ASKED_BY_DEVICE",
    "LENGTHS_IN_TENSORS",
    "WRITES_IN_PLACE",
    "Attention",
    "Autocast",
    "CudaTarget",
    "OptimizerKernel",
    "Target",
    "accumulates_in_place",
    "asks_for_nan",
    "autocast_asked_for_meta",
    "references_when_alone",
    "routed",
    "target_for",
    "warnings_heard",
    "writes_in_place",
]
