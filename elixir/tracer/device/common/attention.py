"""A call of `scaled_dot_product_attention`: the facts on which the choice of a kernel depends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

AttentionKernel = Literal["cudnn", "flash", "efficient", "cpu_flash", "math"]

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Attention:
    """The facts on which the choice of an attention kernel depends."""

    dtype: torch.dtype
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    mask_shape: tuple[int, ...] | None
    mask_needs_grad: bool
    dropout: float
    is_causal: bool
    enable_gqa: bool
    last_dim_contiguous: bool = True
    mask_last_dim_contiguous: bool = True

    @property
    def has_mask(self) -> bool:
        """Whether there is a mask or an additive bias."""
        return self.mask_shape is not None

    @property
    def broadcasts(self) -> bool:
        """Whether batches or heads differ where they are not said to be grouped: only the math form takes that."""
        (batch, heads), key, value = self.query_shape[:2], self.key_shape[:2], self.value_shape[:2]
        grouped = self.enable_gqa and heads % key[1] == heads % value[1] == 0
        return key[0] != batch or value[0] != batch or not (grouped or heads == key[1] == value[1])
