"""Shapes of operators for which PyTorch has no meta kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

LENGTHS_IN_TENSORS: dict[Any, tuple[Any, tuple[int, ...]]] = {
    aten._ctc_loss.Tensor: (aten._ctc_loss.default, (2, 3)),
    aten._ctc_loss_backward.Tensor: (aten._ctc_loss_backward.default, (3, 4)),
}
"""Operator -> the same with lengths as numbers, and which arguments the lengths are."""


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates a loss per sample and a row of alphas per moment (`ctc_loss_allocate_outputs` in `LossCTC.cpp`)."""
    moments, samples = log_probs.shape[0], log_probs.shape[1]
    alphas = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty(samples), log_probs.new_empty(samples, moments, alphas)


def _ctc_loss_backward(  # noqa: PLR0913 - the operator's own arguments
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    loss: torch.Tensor,
    log_alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


KERNELS: dict[str, Callable[..., Any]] = {"_ctc_loss": _ctc_loss, "_ctc_loss_backward": _ctc_loss_backward}
"""Name in `aten` -> meta kernel."""
