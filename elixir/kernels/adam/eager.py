"""An Adam step of PyTorch's operators, in pieces that fit a cache: torch's fused kernel, or the rule written out.

A step that casts, steps and casts over a whole shard moves 1.5 times the bytes that it must, and allocates a float32
gradient. In pieces, the float32 gradient is a small buffer that stays in the cache, as do the new master weights until
they are rounded. So the shard passes through memory about once, even without a compiler.
"""

from __future__ import annotations

import torch

from elixir.hardware.process_memory import HEAP
from elixir.kernels.adam.adam_rule import AdamOptions, adam_rule, adam_scalars
from elixir.kernels.adam.moments import MasterStates, read_moments, write_moments
from elixir.optimizer_states import LARGEST_HOST_PIECE_NUMEL, LARGEST_PIECE_NUMEL
from elixir.torch_private import fused_adam, fused_adamw

IN_PIECES, PLAIN = "in pieces", "plain"
"""Forms of an eager step: torch's fused kernel on pieces, or PyTorch's operators on pieces."""

_CPU_PIECE_NUMEL = 2**18
"""Per thread: 1 MiB of float32. Shorter pieces fit a core's second-level cache more surely, but threads meet after each
operator on each piece, which costs a time slice if other programs use the cores."""


def eager_step(
    gradient: torch.Tensor,
    states: MasterStates,
    weight_out: torch.Tensor | None,
    options: AdamOptions,
    step: int,
    factor: float,
    first: int = 0,
) -> str:
    """One step in place.

    Args:
        gradient, weight_out, options, step, factor: as of `adam_step`.
        states: master weights of just these elements, and moments that may be of more.
        first: position of element 0 in the moments.

    Returns:
        The form of the step: `IN_PIECES` or `PLAIN`.
    """
    (master, moments), device = states, states.master.device
    numel, fused = master.numel(), moments.kind == "float32" and device.type in ("cpu", "cuda")
    piece_numel = LARGEST_PIECE_NUMEL
    if device.type == "cpu":
        most = LARGEST_PIECE_NUMEL if fused else LARGEST_HOST_PIECE_NUMEL
        piece_numel = min(_CPU_PIECE_NUMEL * torch.get_num_threads(), most)
    as_it_is = gradient.dtype == torch.float32 and factor == 1.0
    if fused and as_it_is and weight_out is None:
        piece_numel = numel
    scratch = (
        torch.empty(min(numel, piece_numel), dtype=torch.float32, device=device) if fused and not as_it_is else None
    )
    for start in range(0, numel, piece_numel):
        piece = slice(start, min(start + piece_numel, numel))
        weights, ours, out = master[piece], gradient[piece], None if weight_out is None else weight_out[piece]
        if not fused:
            HEAP.trim_if_over()  # each piece may leave gaps
            rule_step(ours, MasterStates(weights, moments), out, options, step, factor, first + start)
            continue
        if scratch is not None:
            ours = scratch[: weights.numel()].copy_(ours)
            if factor != 1.0:
                ours.mul_(factor)
        part = moments.cut(first + piece.start, first + piece.stop)
        fused_step(ours, weights, part.exp_avg, part.exp_avg_sq, options, step)
        if out is not None:
            out.copy_(weights)
    return IN_PIECES if fused else PLAIN


def rule_step(
    gradient: torch.Tensor,
    states: MasterStates,
    weight_out: torch.Tensor | None,
    options: AdamOptions,
    step: int,
    factor: float,
    first: int,
) -> None:
    """`eager_step` by `adam_rule`, all elements at once."""
    (master, moments), scalars = states, adam_scalars(options, step, factor, states.master.device)
    old = [*read_moments(moments, master.numel(), first)]
    # Popped, so that the rule frees each as soon as there is a new one.
    new, exp_avg, exp_avg_sq = adam_rule(gradient, master, old.pop(0), old.pop(), scalars)
    master.copy_(new)
    if weight_out is not None:
        weight_out.copy_(new)
    del new  # while they are rounded, moments take as much
    write_moments(moments, first, exp_avg, exp_avg_sq, step)


def fused_step(
    gradient: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    options: AdamOptions,
    step: int,
) -> None:
    """torch's fused kernel over float32 tensors on a CPU or CUDA device."""
    (fused_adamw if options.decoupled else fused_adam)(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(step), dtype=torch.float32, device=master.device)],  # a kernel: nobody waits
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=options.maximize,
    )
