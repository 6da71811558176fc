"""Gradients that user code asks for inside of a pass, where graphs end at layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elixir.errors import InputError
from elixir.wrapper.one_pass.regions import Slot, leaf_of


def refuse_incomplete(
    outputs: Sequence[Any], inputs: Sequence[Any], kept: bool, is_new: Callable[[torch.Tensor], bool]
) -> None:
    """Refuses gradients that would lack the parts that go through layers, at which graphs end, or go on from there.

    Args:
        outputs: tensors, or edges of the graph, where the backward begins.
        inputs: likewise, where it ends.
        kept: whether they are added to ``.grad``, in whose place an end at a layer sends them on.
        is_new: whether a weight was not used before the last layer.

    Raises:
        InputError: a gradient would lack such parts, or be None.
    """
    ends = _ends(outputs)
    for each in inputs:
        leaf, slot = (each, Slot.of(each)) if _is_leaf(each) else leaf_of(_node(each))
        if slot is not None:
            made = slot.made - 1  # another end that is as old may be made of it inside of their layer
        elif leaf is not None:
            made = max((end.made for end in ends), default=0) if is_new(leaf) else -1
        else:
            made = _node(each)._sequence_nr()
        if (kept and slot is not None) or any(end is not slot and end.made > made for end in ends):
            raise InputError(
                "torch.autograd.grad, or backward(inputs=), asks inside of a pass for a gradient that goes through "
                "layers, at which graphs end while several micro-batches pass them together; leave it out, ask for "
                "that of what comes after the last layer, or plan with pass_size=1"
            )


def _ends(outputs: Sequence[Any]) -> list[Slot]:
    """The ends of the graphs of some outputs at layers."""
    tensors = (each for each in outputs if isinstance(each, torch.Tensor))
    found = [slot for each in tensors if (slot := Slot.of(each)) is not None]  # such as leaves, which no node has made
    todo, seen = [_node(each) for each in outputs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        _, slot = leaf_of(node)
        if slot is None:
            todo += [following for following, _ in node.next_functions]
        else:
            found.append(slot)
    return found


def _is_leaf(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.grad_fn is None


def _node(each: Any) -> Any:
    """The node of autograd that made a tensor, or of an edge."""
    return each.grad_fn if isinstance(each, torch.Tensor) else each.node
