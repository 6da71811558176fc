"""Cross-entropy over a linear layer's output without that output: logits are made a slice of the vocabulary at a time.

Forward goes over the slices, keeps a running maximum and sum of exponentials per token, and saves the log-sum-exp
alone. Backward makes each slice again and turns it into its gradients. So where plain PyTorch keeps logits in the
model's dtype, in float32 and as log-probabilities, here a slice is alive at a time; the price is one more product with
the weight.

Slices go over the vocabulary rather than over tokens because then each row of the weight's gradient is complete in one
product: it is rounded once, as in the plain form, and needs no float32 accumulator of the weight's size. Recomputing
rather than making gradients in forward lets the incoming gradient (with it a loss scale) enter before anything is
rounded to low precision, keeps no gradient of the weight's size between forward and backward, and lets backward run
twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from elixir.access.interception import untrack
from elixir.errors import InputError
from elixir.units import MIB

SLICE_BYTES = 128 * MIB
"""Size of one slice of logits in float32: large enough that a product fills a GPU, small compared with all logits."""

MIN_SLICE_COLUMNS = 256
"""Classes in a slice at least, however many tokens there are: narrower products waste a matrix unit."""


def _present_values(parameter: torch.Tensor | None) -> Any:
    """A parameter's memory as an ordinary tensor without a graph, for a kernel that reads it often: it reports one use.

    Valid until the module that runs now returns.
    """
    if parameter is None:
        return None
    values = parameter.detach()
    untrack([values])
    return values


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def slice_columns(tokens: int, classes: int) -> int:
    """Classes per slice for so many tokens."""
    fitting = SLICE_BYTES // (4 * max(tokens, 1))
    return min(classes, max(fitting // MIN_SLICE_COLUMNS * MIN_SLICE_COLUMNS, MIN_SLICE_COLUMNS))


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), target)``, without ever holding all logits.

    Args:
        hidden: (tokens, features), any floating dtype.
        weight: (classes, features) of the same dtype; may be a streamed parameter, or tied to an embedding.
        target: (tokens,) int64, classes or `ignore_index`.
        bias: (classes,), or None.
        ignore_index: tokens with this target count for nothing.
        reduction: ``mean`` over the tokens that count (nan if there are none, as in PyTorch), or ``sum``.

    Returns:
        A float32 scalar (float64 for float64). Differentiable once, in `hidden`, `weight` and `bias`.

    Raises:
        InputError: shapes or dtypes do not fit, or on the CPU, a target is no class; or its backward is differentiated.
            On other devices, where looking would stop the device, such a target makes the loss nan.
    """
    _check(hidden, weight, target, bias, reduction)
    if target.device.type == "cpu":
        _check_targets(target, weight.shape[0], ignore_index)
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, target, ignore_index, reduction == "mean")  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignore_index: int,
        mean: bool,
    ) -> torch.Tensor:
        present = (_present_values(weight), _present_values(bias))
        tokens, classes = hidden.shape[0], weight.shape[0]
        columns = slice_columns(tokens, classes)
        wide = _wide(hidden.dtype)
        peak = torch.full((tokens,), -torch.inf, dtype=wide, device=hidden.device)
        total = torch.zeros_like(peak)
        own = torch.full_like(peak, torch.nan)  # stays so where a target is no class
        for start in range(0, classes, columns):
            logits = _logits(hidden, *present, start, columns)
            own = torch.where(*_inside(logits, target, start), own)
            higher = torch.maximum(peak, logits.amax(1))
            total.mul_(peak.sub_(higher).exp_())
            total.add_(logits.sub_(higher.unsqueeze(1)).exp_().sum(1))
            peak = higher
            del logits, higher
        normaliser = total.log_().add_(peak)
        counts = target != ignore_index
        loss = torch.where(counts, normaliser - own, 0.0).sum()
        counted = counts.sum() if mean else None
        ctx.save_for_backward(hidden, weight, bias, target, normaliser, counted)
        ctx.ignore_index = ignore_index
        return loss if counted is None else loss / counted

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # `once_differentiable` refuses only where the incoming gradient depends on something: a gradient penalty, for
        # which the saved tensors do, would silently be left out.
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True needs a second derivative, which the fused loss does not have; choose "
                'use_fused_kernels={"cross_entropy": "plain"}'
            )
        hidden, weight, bias, target, normaliser, counted = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        columns = slice_columns(hidden.shape[0], weight.shape[0])
        share = gradient if counted is None else gradient / counted
        shares = torch.where(target != ctx.ignore_index, share, 0.0).to(normaliser.dtype).unsqueeze(1)
        of_hidden = None
        of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        of_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
        for start in range(0, weight.shape[0], columns):
            end = start + columns
            logits = _logits(hidden, weight, bias, start, columns)
            slope = logits.sub_(normaliser.unsqueeze(1)).exp_()  # probabilities
            place, inside = _place(slope, target, start)
            slope.scatter_add_(1, place, -inside.to(slope.dtype).unsqueeze(1))
            slope = slope.mul_(shares).to(hidden.dtype)
            del logits, place, inside
            if of_weight is not None:
                of_weight[start:end].copy_(slope.t() @ hidden)
            if of_bias is not None:
                of_bias[start:end].copy_(slope.sum(0))
            if needs_hidden:
                part = (slope @ weight[start:end]).to(normaliser.dtype)
                of_hidden = part if of_hidden is None else of_hidden.add_(part)
                del part
            del slope
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, start: int, columns: int
) -> torch.Tensor:
    """One slice, rounded to the model's dtype as the plain form rounds it, then in float32; the caller's to write
    to."""
    end = start + columns
    logits = F.linear(hidden, weight[start:end], None if bias is None else bias[start:end])
    return logits.to(_wide(logits.dtype))


def _place(logits: torch.Tensor, target: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each token's target in a slice, as (tokens, 1), 0 where it is elsewhere; and whether it is there."""
    place = target - start
    inside = (place >= 0) & (place < logits.shape[1])
    return place.mul_(inside).unsqueeze(1), inside


def _inside(logits: torch.Tensor, target: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each token's target is in a slice, and the logit that it would have there."""
    place, inside = _place(logits, target, start)
    return inside, logits.gather(1, place).squeeze(1)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, reduction: str
) -> None:
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction is 'mean' or 'sum', got {reduction!r}")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise InputError(
            "hidden must be (tokens, features) and weight (classes, features), got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if target.dtype != torch.int64 or target.shape != hidden.shape[:1]:
        raise InputError(
            f"target must be int64 of shape {tuple(hidden.shape[:1])}, got {target.dtype} of {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias must be of shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    dtypes = [tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None]
    if len(set(dtypes)) > 1 or not hidden.is_floating_point():
        raise InputError(f"hidden, weight and bias must have one floating dtype, got {', '.join(map(str, dtypes))}")


def _check_targets(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise InputError(f"target {int(wrong[0])} is none of the {classes} classes and not ignore_index {ignore_index}")
