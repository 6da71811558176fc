"""One Adam step over a flat shard, in place or into other memory: by the C++ kernel once it is there, before eager."""

from __future__ import annotations

import torch

from elixir.errors import InputError, InputTypeError
from elixir.kernels.adam.adam_rule import AdamOptions, check_step
from elixir.kernels.adam.eager import IN_PIECES, eager_step, rule_step
from elixir.kernels.adam.moments import MasterStates, Moments, moment_numel
from elixir.kernels.adam.native import Combination, kernel_for
from elixir.optimizer_states import BLOCK_NUMEL

COMPILED = "compiled"
"""The form of a step in place by the C++ kernel. Eager forms are in `elixir.kernels.adam.eager`."""
ONE_PASS, COPIED = "one pass", "copied"
"""Forms of a step out of place: by the kernel, or in place on a copy."""


@torch.no_grad()
def adam_step(  # noqa: PLR0913 - tensors, then numbers
    gradient: torch.Tensor,
    master: torch.Tensor,
    weight_out: torch.Tensor | None,
    moments: Moments,
    options: AdamOptions,
    step: int,
    factor: float = 1.0,
    *,
    at: int | None = None,
    into: MasterStates | None = None,
) -> str:
    """One Adam step over a flat shard. On the host, all forms give the same bits.

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
        into: other memory on the host, of the same kind and size, which takes new weights and moments; `master` and
            `moments` are left as they are.

    Returns:
        The form of the step: `COMPILED`, or what `eager_step` says; with `into`, `ONE_PASS` or `COPIED`.

    Raises:
        InputError, InputTypeError: tensors do not fit together, or a number is out of range.
    """
    old = MasterStates(master, moments)
    for states in (old,) if into is None else (old, into):
        _check_tensors(gradient, states, weight_out, at)
    check_step(step, factor)
    numel, first = master.numel(), at or 0
    if numel == 0:
        return IN_PIECES if into is None else COPIED
    weight, separate = None if weight_out is None else weight_out.dtype, into is not None and moments.kind != "8bit"
    kernel = None
    if master.device.type == "cpu":
        kernel = kernel_for(Combination(gradient.dtype, weight, moments.kind), numel, separate=separate)
    if into is not None:
        new = MasterStates(into.master, into.moments.cut(first, first + numel))
        old = MasterStates(master, moments.cut(first, first + numel))
        if separate and kernel is not None:
            kernel(gradient, old, new, weight_out, options, step, factor, first)
            return ONE_PASS
        for mine, theirs in zip((new.master, *new.moments.tensors()), (master, *old.moments.tensors()), strict=True):
            mine.copy_(theirs)
        adam_step(gradient, into.master, weight_out, into.moments, options, step, factor, at=at)
        return COPIED
    begin, end = _whole_blocks(first, numel) if moments.kind == "8bit" else (0, numel)
    whole, place = slice(begin, end), first + begin
    out = None if weight_out is None else weight_out[whole]
    if kernel is None:
        form = eager_step(gradient[whole], MasterStates(master[whole], moments), out, options, step, factor, place)
    else:
        states = MasterStates(master[whole], moments.cut(place, first + end))
        kernel(gradient[whole], states, states, out, options, step, factor, place)
        form = COMPILED
    for part in (slice(0, begin), slice(end, numel)):  # of 8-bit blocks that others share
        if part.start < part.stop:
            out = None if weight_out is None else weight_out[part]
            states = MasterStates(master[part], moments)
            rule_step(gradient[part], states, out, options, step, factor, first + part.start)
    return form


def _whole_blocks(first: int, numel: int) -> tuple[int, int]:
    """The range of elements that fill whole blocks, if the first element lies at `first` of a tensor."""
    begin = min(-first % BLOCK_NUMEL, numel)
    return begin, max(begin, numel - (first + numel) % BLOCK_NUMEL)


def _check_tensors(
    gradient: torch.Tensor, states: MasterStates, weight_out: torch.Tensor | None, at: int | None
) -> None:
    master, moments = states
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
    begin = (at or 0) - moments.first
    expected = moment_numel(begin + master.numel(), moments.kind)
    more, where = ("", "") if at is None else (" or more", f" at element {at}")
    for tensor in (moments.exp_avg, moments.exp_avg_sq):
        fits = tensor.shape == (expected,) if at is None else begin >= 0 and tensor.numel() >= expected
        if not fits or tensor.device != master.device:
            raise InputError(
                f"{moments.kind} moments of {master.numel()} weights{where} on {master.device} have {expected}{more} "
                f"elements there, got {tuple(tensor.shape)} on {tensor.device}; make them with make_moments"
            )
