"""Writes in place of autograd, which it avoids while a dispatch mode is watching: sums, and gradients of indexing.

When two gradients meet, the engine adds the second to the first in place if nobody else holds the first
(`input_buffer.cpp`, `can_accumulate_inplace`). Under a dispatch mode it always makes a new tensor: for tied embeddings
one more of the largest gradients, at the very peak. So the trace recognises such sums and repeats what the engine
would do without it.

Formulas of derivatives do the same (`FunctionsManual.cpp`, wherever it asks `areAnyTensorSubclassLike`): the gradient
of ``h[ids]`` is written into zeros that the formula has just made, but under a mode into a copy of them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from elixir.access.autograd import backward_is_running
from elixir.memory_order import is_dense
from elixir.torch_private import TorchDispatchMode, current_autograd_node, references

aten = torch.ops.aten


def engine_asks() -> bool:
    """Whether autograd's engine, and no `backward` in Python, calls the operator that is being dispatched."""
    frame = sys._getframe()
    while frame.f_code.co_name != "__torch_dispatch__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_back is not None and frame.f_back.f_code.co_name == "_engine_run_backward"


def asks_for_nan(made_by: Any) -> bool:
    """Whether a number that is read out is the answer of anomaly detection, made by this operator.

    It looks at every gradient (`Engine::evaluate_function` in `engine.cpp`). A NaN would end the step there.
    """
    return made_by is aten._is_any_true.default and engine_asks()


def accumulates_in_place(args: Any) -> bool:
    """Whether an `aten.add.Tensor` with these arguments is a sum that the engine would do in place."""
    # A Python scalar may be either operand: `torch.add(0.5, mask)` runs `add.Tensor` with the number first.
    if not backward_is_running() or len(args) != 2 or not all(isinstance(item, torch.Tensor) for item in args):
        return False
    first, second = args
    if first.shape != second.shape or first.dtype != second.dtype or not is_dense(first.shape, first.stride()):
        return False
    return engine_asks() and references(first) == references_when_alone()


_INTO_ZEROS = frozenset(
    {
        aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default, aten.put.default,
        aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.masked_scatter.default,
        aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    }
)  # fmt: skip
_ZEROS = frozenset({aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default, aten.full.default})

_IN_PLACE_IN_NODE = {
    "BinaryCrossEntropyWithLogitsBackward0": frozenset({aten.sub.Tensor, aten.mul.Tensor}),
}
"""Name of an autograd node -> operators that its formula would do in place on what it has made itself."""


WRITES_IN_PLACE = _INTO_ZEROS.union(*_IN_PLACE_IN_NODE.values())
"""Operators that a formula of a derivative may do in place; `writes_in_place` says whether one does."""


def writes_in_place(func: Any, made_by: Any) -> bool:
    """Whether a formula of a derivative would do `func` in place on its first argument, which the same node has made.

    Args:
        func: the operator.
        made_by: the operator that made the argument.
    """
    if func not in _INTO_ZEROS or made_by not in _ZEROS:
        node = current_autograd_node()
        if node is None or func not in _IN_PLACE_IN_NODE.get(node.name(), ()):
            return False
    return engine_asks()


@functools.cache
def references_when_alone() -> tuple[int, int]:
    """The counts of a first gradient that nobody else holds, read off a sum the engine is known to do in place.

    To be called once before a trace: inside a dispatch no graph can be built.
    """
    seen: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor and backward_is_running():
                seen.append(references(args[0]))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, device="meta", requires_grad=True)
    # Anomaly detection would read a number out of each gradient.
    with torch.autograd.set_detect_anomaly(False), Probe():  # type: ignore[no-untyped-call]
        (x * 2 + x * 3).sum().backward()
    return seen[0] if seen else (0, 0)
