"""`MuonRule`: the step of `torch.optim.Muon`, cut into what concerns single elements and what concerns a whole matrix.

The momentum and the change of weights are elementwise, so they run at the home of the states, over any part of a
matrix. In between, Newton-Schulz makes the whole matrix orthogonal, in bfloat16 on the device. Each part has the bits
of the class (`check_rule`).

A class of the user's that steps matrices in these three parts names its rule:

    class MyMuon(torch.optim.Optimizer):
        elixir_rule = MyRule  # a subclass of MuonRule with other static methods; MuonRule itself for the same numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.optimizer_states import LARGEST_HOST_PIECE_NUMEL, LARGEST_PIECE_NUMEL

MOMENTUM = "momentum_buffer"
"""Name of the state of a parameter."""
_TRIAL_SHAPES = ((24, 40), (40, 24))
_TRIAL_STEPS = 3
_TRIAL_RATE = 1e-2
"""The least learning rate: with the rate of a warm-up's first step no difference would show."""


def _pieces(numel: int, device: torch.device) -> Iterator[slice]:
    """Parts in which elementwise work runs, so that its temporaries stay small."""
    most = LARGEST_HOST_PIECE_NUMEL if device.type == "cpu" else LARGEST_PIECE_NUMEL
    return (slice(first, min(first + most, numel)) for first in range(0, numel, most))


class MuonRule:
    """The rule of `torch.optim.Muon`. All tensors but the matrix are flat, and parts of it.

    A matrix without a gradient stays as it is, with its momentum.
    """

    family = "Muon"
    """One of `elixir.optimizer_states.MATRIX_FAMILIES`, which says what a plan counts."""

    @staticmethod
    def direction(
        gradient: torch.Tensor,
        momentum: torch.Tensor,
        factor: float | torch.Tensor,
        options: Mapping[str, Any],
        out: torch.Tensor,
    ) -> None:
        """Updates the momentum, and writes the direction that is to be made orthogonal.

        Args:
            gradient: as it arrived; it stays as it is.
            momentum: the state.
            factor: multiplies the gradient first.
            options: of the parameter group.
            out: takes the direction, in bfloat16.
        """
        decay = options["momentum"]
        for piece in _pieces(gradient.numel(), gradient.device):
            part, kept = gradient[piece].to(momentum.dtype), momentum[piece]
            if isinstance(factor, torch.Tensor) or factor != 1.0:
                part = part * factor
            kept.lerp_(part, 1 - decay)
            out[piece].copy_(part.lerp(kept, decay) if options["nesterov"] else kept)

    @staticmethod
    def orthogonal(matrix: torch.Tensor, room: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """Returns the matrix made orthogonal: a view of `room`.

        Args:
            matrix: ``[rows, columns]`` in bfloat16, in the first elements of `room`; it is overwritten.
            room: flat, in bfloat16, of `elixir.optimizer_states.matrix_room_bytes`.
            options: of the parameter group.
        """
        a, b, c = options["ns_coefficients"]
        tall = matrix.shape[0] > matrix.shape[1]
        found = matrix.T if tall else matrix
        least, most = found.shape
        numel, square = least * most, least * least
        gram, update = (room[2 * numel + at : 2 * numel + at + square].view(least, least) for at in (0, square))
        iterates = [room[at : at + numel].view(least, most) for at in (0, numel)]
        found.div_(found.norm().clamp(min=options["eps"]))
        for step in range(options["ns_steps"]):
            torch.mm(found, found.T, out=gram)
            torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
            found = torch.addmm(found, update, found, beta=a, out=iterates[(step + 1) % 2])
        return found.T if tall else found

    @staticmethod
    def change(weights: torch.Tensor, direction: torch.Tensor, shape: torch.Size, options: Mapping[str, Any]) -> None:
        """Changes weights in place.

        Args:
            weights: master weights, or the weights themselves.
            direction: the same elements of the orthogonal matrix.
            shape: of the whole matrix.
            options: of the parameter group.
        """
        lr: Any = options["lr"].squeeze() if isinstance(options["lr"], torch.Tensor) else options["lr"]
        ratio, how = 1.0, options["adjust_lr_fn"]
        if how is None or how == "original":
            ratio = math.sqrt(max(1, shape[0] / shape[1]))
        elif how == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(shape[0], shape[1]))
        for piece in _pieces(weights.numel(), weights.device):
            weights[piece].mul_(1 - lr * options["weight_decay"])
            weights[piece].add_(direction[piece], alpha=-lr * ratio)


MATRIX_RULES: dict[type, type[MuonRule]] = {torch.optim.Muon: MuonRule}
"""Classes over whole matrices that can be stepped -> their rules. A subclass may do more, so it names its own."""


def matrix_rule(optimizer: torch.optim.Optimizer) -> type[MuonRule] | None:
    """The rule of an optimizer over whole matrices: what its class names as ``elixir_rule``, or that of `MATRIX_RULES`;
    None if it has none.

    Raises:
        InputTypeError: the class names something else.
    """
    kind = type(optimizer)
    found = vars(kind).get("elixir_rule", MATRIX_RULES.get(kind))
    if found is not None and not (isinstance(found, type) and issubclass(found, MuonRule)):
        raise InputTypeError(f"{kind.__name__}.elixir_rule must be MuonRule or a subclass of it, found {found!r}")
    return found


@torch.no_grad()
def check_rule(rule: type[MuonRule], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Makes sure that a rule has the bits of its class in the torch that is installed, and its states.

    Args:
        rule: of the class.
        make: creates an optimizer of the class over parameters, in one group with the caller's options.

    Raises:
        InputError: it has not.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    theirs = [nn.Parameter(drawn(shape)) for shape in _TRIAL_SHAPES]
    mine, momenta = [each.detach().clone() for each in theirs], [torch.zeros_like(each) for each in theirs]
    optimizer = make(theirs)
    options = optimizer.param_groups[0]
    rate = options["lr"]
    options["lr"] = rate.clamp(min=_TRIAL_RATE) if isinstance(rate, torch.Tensor) else max(rate, _TRIAL_RATE)
    for step in range(_TRIAL_STEPS):
        for weights, own, momentum in zip(theirs, mine, momenta, strict=True):
            weights.grad, numel = drawn(tuple(weights.shape)), weights.numel()
            if step == 1 and weights is theirs[0]:
                weights.grad = None
                continue
            room = torch.empty(2 * (numel + min(weights.shape) ** 2), dtype=torch.bfloat16, device="cpu")
            rule.direction(weights.grad.view(-1), momentum.view(-1), 1.0, options, room[:numel])
            found = rule.orthogonal(room[:numel].view(weights.shape), room, options)
            rule.change(own.view(-1), found.reshape(-1), weights.shape, options)
        optimizer.step()
        states = [optimizer.state[weights] for weights in theirs]
        same = all(list(state) == [MOMENTUM] for state in states) and all(
            torch.equal(own, weights) and torch.equal(momentum, state[MOMENTUM])
            for own, weights, momentum, state in zip(mine, theirs, momenta, states, strict=True)
        )
        if not same:
            raise InputError(
                f"{type(optimizer).__name__} steps with other numbers, or other states than a {MOMENTUM}, than its "
                f"rule {rule.__name__} in this torch ({torch.__version__}); use an elementwise optimizer such as "
                "AdamW; correct the rule if it is yours, otherwise report this"
            )
