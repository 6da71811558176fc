"""Which tensors of a model can be planned, and which of them take another dtype when the whole model does."""

from __future__ import annotations

import torch
from torch import nn

from elixir.errors import InputError
from elixir.torch_private import DisableTorchFunctionSubclass


def refuse_unplannable(model: nn.Module) -> None:
    """Chunks are flat buffers of floating numbers: every parameter must be dense and real.

    Raises:
        InputError: a parameter is complex, sparse, nested or of whole numbers; says its name and the way out.
    """
    with DisableTorchFunctionSubclass():  # what a parameter is made of is asked, not its values, which may be elsewhere
        for name, parameter in model.named_parameters():
            if parameter.is_nested:
                found, way = "a nested tensor", "pad it to a dense one, or make each part a parameter"
            elif parameter.layout is not torch.strided:
                found, way = (
                    f"a {parameter.layout} tensor",
                    "make it dense (to_dense()), or a buffer if it is not trained",
                )
            elif parameter.is_complex():
                found, way = (
                    f"of {parameter.dtype}",
                    "keep torch.view_as_real of it, and torch.view_as_complex in forward",
                )
            elif not parameter.is_floating_point():
                found, way = f"of {parameter.dtype}", "make it a buffer"
            else:
                continue
            raise InputError(f"{name} is {found}; only dense floating parameters can be planned: {way}")


def casts_buffers(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether floating buffers take `dtype` together with the parameters, as `model.to(dtype)` has it.

    They do where the model is cast as a whole. Where some parameters are of `dtype` already, its author built it so,
    and buffers in another one (such as the float32 frequencies of rotary positions) are meant to be.
    """
    if dtype is None:
        return False
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return bool(dtypes) and dtype not in dtypes
