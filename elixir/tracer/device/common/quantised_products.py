"""Products with packed weights, composed of what their kernels do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_BLOCK_OF_SCALES = 256


def kernels() -> dict[str, Callable[..., Any]]:
    """Name in the namespace `bitsandbytes` -> what runs it in a trace; empty where the library is not loaded."""
    return {"gemm_4bit": _gemm_4bit} if hasattr(torch.ops.bitsandbytes, "gemm_4bit") else {}


def _gemm_4bit(  # noqa: PLR0913 - the operator's own arguments
    inp: torch.Tensor,
    packed: torch.Tensor,
    shape: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Unpacks the weight and multiplies by it.

    So does the CPU always, and a GPU from some hundred rows on, at the latest from 1,537; with fewer rows its kernel
    may unpack in registers, and then takes less memory than is counted here (bitsandbytes 0.50,
    ``backends/cuda/ops.py``).
    """
    library = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = library.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, _BLOCK_OF_SCALES, torch.float32)
        absmax = scales + absmax_offset
    weight = library.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, inp.dtype)
    return F.linear(inp, weight, bias)
