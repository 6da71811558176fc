"""One Adam step over a flat shard: compiled where that is ready, else torch's fused kernel on pieces that fit a cache.

Written as cast, step, cast over a whole shard, Adam moves half as many bytes again as it must, and allocates a float32
gradient. On pieces the float32 gradient is a small buffer that stays in the cache, and so do the new master weights
until they are rounded; so even without a compiler the shard passes through memory about once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elixir.errors import InputError, InputTypeError
from elixir.kernels.adam.moments import (
    STEPS,
    Moments,
    adam_8bit_part_,
    moment_numel,
    step_arguments,
)
from elixir.kernels.adam.rule import AdamOptions, adam_scalars, check_step
from elixir.kernels.adam.when_compiled import Combination, compiled_step
from elixir.optimizer_states import BLOCK_NUMEL, LARGEST_HOST_PIECE_NUMEL, LARGEST_PIECE_NUMEL, MomentKind
from elixir.torch_private import fused_adam, fused_adamw

COMPILED, IN_PIECES, PLAIN = "compiled", "in pieces", "plain"
"""Forms of a step in place: one compiled pass, torch's fused kernel on pieces, or PyTorch's operators on pieces."""

_CPU_PIECE_NUMEL = 2**18
"""Per thread: 1 MiB of float32. Shorter pieces stay in a core's second-level cache more surely, but threads meet after
each operator on each piece, which costs a time slice where others want the cores too."""
_WHOLE_NUMEL = 2**30
"""Longest piece of compiled code, whose positions are 32-bit."""


def adam_step(
    gradient: torch.Tensor,
    master: torch.Tensor,
    weight_out: torch.Tensor | None,
    moments: Moments,
    options: AdamOptions,
    step: int,
    factor: float = 1.0,
    *,
    at: int | None = None,
) -> str:
    """One Adam step in place over a flat shard. Compiled and eager results differ by rounding only.

    Args:
        gradient: flat, any floating dtype; left as it is.
        master: flat float32 weights; updated.
        weight_out: flat; takes the new weights in its dtype. None where `master` is what the model reads.
        moments: of as many elements; updated.
        options: of the parameter group.
        step: number of this step, the first being 1.
        factor: the gradient is multiplied by it first.
        at: `moments` are of a longer tensor, in which these elements begin here. Rounding is by the place there, so
            moments in fewer bits are the same whether a tensor is stepped whole or in parts, but for 8-bit blocks that
            a part does not fill: those are rounded once for each part.

    Returns:
        The form of the step: `COMPILED`, `IN_PIECES` or `PLAIN`.

    Raises:
        InputError, InputTypeError: tensors do not fit together, or a number is out of range.
    """
    check_tensors(gradient, master, weight_out, moments, at)
    check_step(step, factor)
    numel, device, first = master.numel(), master.device, at or 0
    if numel == 0:
        return IN_PIECES
    if moments.kind == "float32":
        part = slice(first, first + numel)
        moments, first = Moments("float32", moments.exp_avg[part], moments.exp_avg_sq[part]), 0
    weight_dtype = None if weight_out is None else weight_out.dtype
    compiled = compiled_step(Combination(str(device), gradient.dtype, weight_dtype, moments.kind), numel)
    with torch.no_grad():
        if compiled is None and moments.kind == "float32" and device.type in ("cpu", "cuda"):
            return fused_pieces(gradient, master, weight_out, moments, options, step, factor)
        scalars = adam_scalars(options, step, factor, device)
        piece_numel = _piece_numel(device.type, moments.kind, compiled=compiled is not None)
        begin, end = _whole_blocks(first, numel) if moments.kind == "8bit" else (0, numel)
        for start in range(begin, end, piece_numel):
            stop = min(start + piece_numel, end)
            arguments = step_arguments(gradient, master, weight_out, moments, scalars, step, start, stop, first)
            # One element or one row would be compiled anew, as a special length.
            plain = compiled is None or stop - start <= BLOCK_NUMEL
            (STEPS[moments.kind] if plain or compiled is None else compiled)(*arguments)
        for start, stop in ((0, begin), (end, numel)):
            if start < stop:
                weights = master[start:stop]
                adam_8bit_part_(gradient[start:stop], weights, moments, scalars, step, first + start)
                if weight_out is not None:
                    weight_out[start:stop].copy_(weights)
    return PLAIN if compiled is None else COMPILED


def fused_step(
    gradients: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    options: AdamOptions,
    step: int,
) -> None:
    """torch's fused kernel over float32 tensors of one CPU or CUDA device, all at the same step."""
    kernel = fused_adamw if options.decoupled else fused_adam
    number = torch.full((), float(step), dtype=torch.float32, device=masters[0].device)  # a kernel: nobody waits
    kernel(
        list(masters),
        list(gradients),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [number] * len(masters),
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=options.maximize,
    )


def fused_pieces(
    gradient: torch.Tensor,
    master: torch.Tensor,
    weight_out: torch.Tensor | None,
    moments: Moments,
    options: AdamOptions,
    step: int,
    factor: float,
) -> str:
    """Cast, step and cast, piece by piece; gives `IN_PIECES`."""
    numel = master.numel()
    as_it_is = gradient.dtype == torch.float32 and factor == 1.0
    piece_numel = min(numel, _piece_numel(master.device.type, moments.kind, compiled=False))
    if as_it_is and weight_out is None:
        piece_numel = numel
    scratch = None if as_it_is else torch.empty(piece_numel, device=master.device)
    for start in range(0, numel, piece_numel):
        piece = slice(start, start + piece_numel)
        weights, ours = master[piece], gradient[piece]
        if scratch is not None:
            ours = scratch[: weights.numel()].copy_(ours)
            if factor != 1.0:
                ours.mul_(factor)
        fused_step([ours], [weights], [moments.exp_avg[piece]], [moments.exp_avg_sq[piece]], options, step)
        if weight_out is not None:
            weight_out[piece].copy_(weights)
    return IN_PIECES


def _whole_blocks(first: int, numel: int) -> tuple[int, int]:
    """From where to where elements fill whole blocks, the first of them being at `first` of a tensor."""
    begin = min(-first % BLOCK_NUMEL, numel)
    return begin, max(begin, numel - (first + numel) % BLOCK_NUMEL)


def _piece_numel(device_type: str, kind: MomentKind, *, compiled: bool) -> int:
    """Elements to step at once. Compiled code makes no temporaries of any length."""
    if compiled:
        return _WHOLE_NUMEL
    if device_type == "cpu":
        most = LARGEST_PIECE_NUMEL if kind == "float32" else LARGEST_HOST_PIECE_NUMEL
        return min(_CPU_PIECE_NUMEL * torch.get_num_threads(), most)
    return LARGEST_PIECE_NUMEL


def check_tensors(
    gradient: torch.Tensor, master: torch.Tensor, weight_out: torch.Tensor | None, moments: Moments, at: int | None
) -> None:
    if master.dtype != torch.float32:
        raise InputTypeError(f"master weights must be float32, got {master.dtype}")
    for name, tensor in (("master", master), ("gradient", gradient), ("weight_out", weight_out)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise InputTypeError(f"{name} must be of a floating dtype, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise InputError(f"{name} must be flat and contiguous, got shape {tuple(tensor.shape)}; use .view(-1)")
        if tensor.shape != master.shape or tensor.device != master.device:
            raise InputError(
                f"{name} has {tensor.numel()} elements on {tensor.device}, master has {master.numel()} on "
                f"{master.device}; they must match"
            )
    if at is not None:
        needed, there = moment_numel(at + master.numel(), moments.kind), moments.exp_avg.numel()
        if at < 0 or needed > there or moments.exp_avg.device != master.device:
            raise InputError(
                f"{master.numel()} weights on {master.device} at element {at} need {moments.kind} moments of {needed} "
                "elements "
                f"there, got {there} on {moments.exp_avg.device}"
            )
        return
    expected = moment_numel(master.numel(), moments.kind)
    for tensor in (moments.exp_avg, moments.exp_avg_sq):
        if tensor.shape != (expected,) or tensor.device != master.device:
            raise InputError(
                f"{moments.kind} moments of {master.numel()} weights on {master.device} have {expected} elements "
                "there, "
                f"got {tuple(tensor.shape)} on {tensor.device}; make them with make_moments"
            )
