"""Decides which tensors of a model take another dtype when the whole model does."""

from __future__ import annotations

import torch
from torch import nn


def casts_buffers(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether floating buffers take `dtype` together with the parameters, as `model.to(dtype)` has it.

    They do where the model is cast as a whole. Where some parameters are of `dtype` already, its author built it so,
    and buffers in another one (such as the float32 frequencies of rotary positions) are meant to be.
    """
    if dtype is None:
        return False
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return bool(dtypes) and dtype not in dtypes
