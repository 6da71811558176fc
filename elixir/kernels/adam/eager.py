"""An Adam step of PyTorch's operators, in pieces that fit a cache: torch's fused kernel, or the rule written out.

A step that casts, steps and casts over a whole shard moves 1.5 times the bytes that it must, and allocates a float32
gradient. In pieces, the float32 gradient is a small buffer that stays in the cache, as do the new master weights until
they are rounded. So the shard passes through memory about once, even without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elixir.hardware.process_memory import HEAP
from elixir.kernels.adam.adam_rule import AdamOptions, adam_scalars
from elixir.kernels.adam.moments import STEPS, MasterStates, step_arguments
from elixir.optimizer_states import LARGEST_HOST_PIECE_NUMEL, LARGEST_PIECE_NUMEL, MomentKind
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
    """One step in place; with 8-bit moments, of whole blocks.

    Args:
        gradient, weight_out, options, step, factor: as of `adam_step`.
        states: of just these elements.
        first: position of element 0 in the tensor by whose positions moments are rounded.

    Returns:
        The form of the step: `IN_PIECES` or `PLAIN`.
    """
    kind, device = states.moments.kind, states.master.device
    if kind == "float32" and device.type in ("cpu", "cuda"):
        _fused_pieces(gradient, states, weight_out, options, step, factor)
        return IN_PIECES
    piece_numel = _piece_numel(device.type, kind)
    step_pieces(lambda _: STEPS[kind], piece_numel, gradient, states, weight_out, options, step, factor, first)
    return PLAIN


def step_pieces(  # noqa: PLR0913 - a step's arguments, and how to make it
    function: Callable[[int], Callable[..., object]],
    piece_numel: int,
    gradient: torch.Tensor,
    states: MasterStates,
    weight_out: torch.Tensor | None,
    options: AdamOptions,
    step: int,
    factor: float,
    first: int,
) -> None:
    """Steps piece by piece with the step function that `function` gives for a number of elements."""
    numel = states.master.numel()
    scalars = adam_scalars(options, step, factor, states.master.device)
    for start in range(0, numel, piece_numel):
        HEAP.trim_if_over()  # each piece may leave gaps
        part = slice(start, min(start + piece_numel, numel))
        function(part.stop - start)(*step_arguments(gradient, states, weight_out, scalars, step, part, first))


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


def _fused_pieces(
    gradient: torch.Tensor,
    states: MasterStates,
    weight_out: torch.Tensor | None,
    options: AdamOptions,
    step: int,
    factor: float,
) -> None:
    """Cast, step and cast, piece by piece."""
    master, moments = states
    numel = master.numel()
    as_it_is = gradient.dtype == torch.float32 and factor == 1.0
    piece_numel = min(numel, _piece_numel(master.device.type, moments.kind))
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


def _piece_numel(device_type: str, kind: MomentKind) -> int:
    """Elements to step at once."""
    if device_type == "cpu":
        most = LARGEST_PIECE_NUMEL if kind == "float32" else LARGEST_HOST_PIECE_NUMEL
        return min(_CPU_PIECE_NUMEL * torch.get_num_threads(), most)
    return LARGEST_PIECE_NUMEL
