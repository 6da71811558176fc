"""Weights quantised by libraries: which tensors they are, and which others they need.

bitsandbytes' `Params4bit` is a parameter whose numbers are packed, two to a byte, into a tensor of any dtype. What
unpacks them hangs on the parameter (`quant_state`), where neither `named_parameters` nor `named_buffers` sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

PACKED_CLASSES = frozenset({"Params4bit"})
"""Classes of parameters that may hold packed numbers."""


class Companion(NamedTuple):
    """A tensor that hangs on a packed weight and is needed to unpack it."""

    name: str
    """Its name in bitsandbytes' own checkpoints, such as ``absmax``."""
    holder: Any
    """The object that has it as the attribute `key`."""
    key: str
    tensor: torch.Tensor


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are packed numbers, which have a meaning only with its companions."""
    return vars(tensor).get("quant_state") is not None


def companions(parameter: torch.Tensor) -> Iterator[Companion]:
    """Yields the tensors that unpack a weight; none for an ordinary one."""
    state = vars(parameter).get("quant_state")
    if state is None:
        return
    inner = getattr(state, "state2", None)  # of double quantisation: the scales are quantised, too
    places = [
        ("absmax", state, "absmax"),
        ("quant_map", state, "code"),
        ("nested_offset", state, "offset"),
        ("nested_absmax", inner, "absmax"),
        ("nested_quant_map", inner, "code"),
    ]
    for name, holder, key in places:
        tensor = getattr(holder, key, None)
        if isinstance(tensor, torch.Tensor):
            yield Companion(name, holder, key, tensor)
