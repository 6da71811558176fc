"""Room on disks for what memory does not hold: extents of unnamed files, and tensors that live in an extent."""

from __future__ import annotations

from elixir.extents.extent_file import (
    Extent,
    ExtentFile,
    Requests,
    fastest_requests,
    open_extents,
    whole_blocks,
)
from elixir.extents.stored_tensors import StoredTensors, TensorFile, paged_memory

__all__ = [
    "Extent",
    "ExtentFile",
    "Requests",
    "StoredTensors",
    "TensorFile",
    "fastest_requests",
    "open_extents",
    "paged_memory",
    "whole_blocks",
]
