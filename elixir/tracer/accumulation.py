"""Sums of gradients that autograd makes in place, which it avoids while a dispatch mode is watching.

When two gradients meet, the engine adds the second to the first in place if nobody else holds the first
(`input_buffer.cpp`, `can_accumulate_inplace`). Under a dispatch mode it always makes a new tensor: for tied embeddings
one more of the largest gradients, at the very peak. So the trace recognises such sums and repeats what the engine
would do without it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.access import backward_is_running

aten = torch.ops.aten


def accumulates_in_place(args: Any, depth: int) -> bool:
    """Whether an `aten.add.Tensor` with these arguments is a sum that the engine would do in place.

    Args:
        args: the operator's arguments.
        depth: how many Python frames lie between this call and `__torch_dispatch__`, itself included.
    """
    if not backward_is_running() or len(args) != 2 or not isinstance(args[1], torch.Tensor):
        return False
    first, second = args
    if first.shape != second.shape or first.dtype != second.dtype or not _dense(first):
        return False
    # A sum in a Python `backward` has that function as its caller; the engine's own has the call into the engine.
    caller = sys._getframe(depth + 1).f_code
    return caller.co_name == "_engine_run_backward" and _references(first) == references_when_alone()


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers its storage without gaps or overlaps, in whatever order."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and torch._debug_has_internal_overlap(tensor) == 0


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold the tensor, and how many its storage, seen from inside a dispatch."""
    storage = tensor.untyped_storage()
    return int(tensor._use_count()), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


@functools.cache
def references_when_alone() -> tuple[int, int]:
    """The counts of a first gradient that nobody else holds, read off a sum the engine is known to do in place.

    To be called once before a trace: inside a dispatch no graph can be built.
    """
    seen: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor and backward_is_running():
                seen.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, device="meta", requires_grad=True)
    with Probe():  # type: ignore[no-untyped-call]
        (x * 2 + x * 3).sum().backward()
    return seen[0] if seen else (0, 0)
