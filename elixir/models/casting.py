"""Decides which tensors of a model take another dtype when the whole model does."""

from __future__ import annotations

import torch
from torch import nn

from elixir.models.quantised import is_packed


def cast_dtype(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a parameter of a model that is cast to `dtype`.

    Whole numbers and packed ones stay what they are: a cast would change packed bytes, not their meaning.
    """
    casts = dtype is not None and parameter.is_floating_point() and not is_packed(parameter)
    return dtype if casts and dtype is not None else parameter.dtype


def casts_buffers(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether floating buffers take `dtype` together with the parameters, as `model.to(dtype)` has it.

    They do where the model is cast as a whole. Where some parameters are of `dtype` already, its author built it so,
    and buffers in another one (such as the float32 frequencies of rotary positions) are meant to be.
    """
    if dtype is None:
        return False
    dtypes = {
        parameter.dtype
        for parameter in model.parameters()
        if parameter.is_floating_point() and not is_packed(parameter)
    }
    return bool(dtypes) and dtype not in dtypes
