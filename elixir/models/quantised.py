"""Weights quantised by libraries: which tensors they are, and which others they need.

bitsandbytes' `Params4bit` is a parameter whose numbers are packed, two to a byte, into a tensor of any dtype. What
unpacks them hangs on the parameter (`quant_state`), where neither `named_parameters` nor `named_buffers` sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from elixir.models.inner_tensors import InnerTensor, take_apart

PACKED_CLASSES = frozenset({"Params4bit"})
"""Classes of parameters that may hold packed numbers."""


class Companion(NamedTuple):
    """A tensor that hangs on a packed weight and is needed to unpack it."""

    name: str
    """Its name in bitsandbytes' own checkpoints, such as ``absmax``; that of the table has the kind as well."""
    holder: Any
    """The object that has it as the attribute `key`."""
    key: str
    tensor: torch.Tensor


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are packed numbers, which have a meaning only with its companions."""
    return isinstance(tensor, InnerTensor) or vars(tensor).get("quant_state") is not None


def companions(parameter: torch.Tensor) -> Iterator[Companion]:
    """Yields the tensors that unpack a weight; none for an ordinary one."""
    state = vars(parameter).get("quant_state")
    if state is None:
        return
    inner = getattr(state, "state2", None)  # of double quantisation: the scales are quantised, too
    # A kernel goes by the name of the kind, so numbers of another kind must not be loaded.
    places = [
        ("absmax", state, "absmax"),
        (f"quant_map.{state.quant_type}", state, "code"),
        ("nested_offset", state, "offset"),
        ("nested_absmax", inner, "absmax"),
        ("nested_quant_map", inner, "code"),
    ]
    for name, holder, key in places:
        tensor = getattr(holder, key, None)
        if isinstance(tensor, torch.Tensor):
            yield Companion(name, holder, key, tensor)


def packed_for_cpu(tensor: torch.Tensor) -> bool:
    """Whether an evaluation on a CPU with AVX512-BF16 has put the numbers in its kernel's own order."""
    return bool(getattr(vars(tensor).get("quant_state"), "packing_format_for_cpu", False))


def ready_to_move(model: nn.Module) -> Callable[[], None]:
    """Takes parameters apart that hold tensors, and keeps evaluations from reordering packed numbers.

    bitsandbytes would replace ``weight.data`` and the scales in the first evaluation on a CPU with AVX512-BF16.

    Returns:
        What ends both.
    """
    put_together = take_apart(model)
    layers = [module for module in model.modules() if vars(module).get("support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]

    def end() -> None:
        for layer in layers:
            layer.support_avx512bf16_for_cpu = True  # type: ignore[assignment]
        put_together()

    return end
