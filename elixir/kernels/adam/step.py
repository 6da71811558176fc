"""One Adam step over a flat shard, in place or into other memory: compiled where that is ready, otherwise eager."""

from __future__ import annotations

import torch

from elixir.errors import InputError, InputTypeError
from elixir.kernels.adam.adam_rule import AdamOptions, adam_scalars, check_step
from elixir.kernels.adam.eager import IN_PIECES, eager_step
from elixir.kernels.adam.moments import MasterStates, Moments, adam_8bit_part_, moment_numel
from elixir.kernels.adam.when_compiled import combination_of, compiled_step, kernel_for
from elixir.optimizer_states import BLOCK_NUMEL

COMPILED = "compiled"
"""The form of a step in place by compiled code. Eager forms are in `elixir.kernels.adam.eager`."""
ONE_PASS, COPIED = "one pass", "copied"
"""Forms of a step out of place: by the kernel, or in place on a copy."""


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
    """One Adam step in place over a flat shard. On the host, compiled and eager results are the same to the bit.

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
        The form of the step: `COMPILED`, or what `eager_step` says.

    Raises:
        InputError, InputTypeError: tensors do not fit together, or a number is out of range.
    """
    check_tensors(gradient, master, weight_out, moments, at)
    check_step(step, factor)
    numel, first = master.numel(), at or 0
    if numel == 0:
        return IN_PIECES
    compiled = compiled_step(combination_of(gradient, master, weight_out, moments), numel)
    begin, end = _whole_blocks(first, numel) if moments.kind == "8bit" else (0, numel)
    whole = slice(begin, end)
    states = MasterStates(master[whole], moments.cut(first + begin, first + end))
    out = None if weight_out is None else weight_out[whole]
    with torch.no_grad():
        if compiled is None:
            form = eager_step(gradient[whole], states, out, options, step, factor, first + begin)
        else:
            compiled(gradient[whole], states, states, out, options, step, factor, first + begin)
            form = COMPILED
        for start, stop in ((0, begin), (end, numel)):
            if start < stop:
                weights = master[start:stop]
                scalars = adam_scalars(options, step, factor, master.device)
                adam_8bit_part_(gradient[start:stop], weights, moments, scalars, step, first + start)
                if weight_out is not None:
                    weight_out[start:stop].copy_(weights)
    return form


def adam_step_out_of_place(
    gradient: torch.Tensor,
    old: MasterStates,
    new: MasterStates,
    weight_out: torch.Tensor | None,
    options: AdamOptions,
    step: int,
    factor: float = 1.0,
    *,
    at: int | None = None,
) -> str:
    """`adam_step` with the same bits, into `new`; `old` is left as it is.

    Args:
        gradient: flat, on the host, any floating dtype.
        old: flat master weights and their moments.
        new: takes the new ones; of the same kind and size, and other memory.
        weight_out: flat; takes the new weights in its dtype. None where `new.master` is what the model reads.
        options: of the parameter group.
        step: number of this step, the first being 1.
        factor: the gradient is multiplied by it first.
        at: both moments are of a longer tensor, in which these elements begin here.

    Returns:
        The form of the step: `ONE_PASS` or `COPIED`.

    Raises:
        InputError, InputTypeError: tensors do not fit together, or a number is out of range.
    """
    for states in (old, new):
        check_tensors(gradient, states.master, weight_out, states.moments, at)
    check_step(step, factor)
    numel, first = old.master.numel(), at or 0
    kernel = kernel_for(combination_of(gradient, old.master, weight_out, old.moments))
    mine, theirs = (MasterStates(each.master, each.moments.cut(first, first + numel)) for each in (new, old))
    with torch.no_grad():
        if kernel is None:
            new.master.copy_(old.master)
            for source, target in zip(theirs.moments.tensors(), mine.moments.tensors(), strict=True):
                target.copy_(source)
            adam_step(gradient, new.master, weight_out, new.moments, options, step, factor, at=at)
        elif numel:
            kernel(gradient, theirs, mine, weight_out, options, step, factor, first)
    return COPIED if kernel is None else ONE_PASS


def _whole_blocks(first: int, numel: int) -> tuple[int, int]:
    """The range of elements that fill whole blocks, if the first element lies at `first` of a tensor."""
    begin = min(-first % BLOCK_NUMEL, numel)
    return begin, max(begin, numel - (first + numel) % BLOCK_NUMEL)


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
