"""Adam, written once, as a plain function over flat tensors.

`adam_rule` is the arithmetic; steps with moments in float32, bfloat16 or 8 bits read them, call it and write
them back. It has no branch and takes all numbers from one small tensor, as the C++ kernel does.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elixir.errors import InputError, InputTypeError


@dataclass(frozen=True)
class AdamOptions:
    """Options of one parameter group.

    Raises:
        InputError, InputTypeError: a value outside of its range, or no number.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """Decay the weights (AdamW, arXiv:1711.05101) rather than adding the L2 term to the gradient (arXiv:1412.6980)."""
    maximize: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise InputTypeError(f"{name} must be a number, got {value!r}")
            below = 1.0 if name.startswith("beta") else math.inf
            if not 0.0 <= float(value) < below:
                raise InputError(f"{name} must be {'in [0, 1)' if below == 1.0 else 'finite and >= 0'}, got {value}")


def group_options(group: Mapping[str, Any], *, decoupled: bool) -> AdamOptions:
    """The options of a parameter group of torch's Adams or of `HybridAdam`, as they are now: schedulers write to it.

    Args:
        group: of an optimizer.
        decoupled: AdamW's decay, if the group does not say. A group with both names was loaded by torch's Adam from a
            `HybridAdam`, which has the second name only.

    Raises:
        InputError, InputTypeError: a value is absent, outside of its range, or no number.
    """
    missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
    if missing:
        raise InputError(f"a group of Adam has lr, betas, eps and weight_decay; this one lacks {', '.join(missing)}")
    try:
        beta1, beta2 = (float(beta) for beta in group["betas"])
    except (TypeError, ValueError):
        raise InputError(f"betas must be two numbers, got {group['betas']!r}") from None
    lr = group["lr"]
    return AdamOptions(
        lr=lr.item() if hasattr(lr, "item") else lr,  # a tensor, or one of numpy
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group.get("decoupled_weight_decay", group.get("adamw_mode", decoupled)),
        maximize=bool(group.get("maximize", False)),
    )


def step_numbers(options: AdamOptions, step: int, factor: float) -> tuple[float, ...]:
    """The numbers of a step in float64, as `torch.optim.Adam` computes them: factor and sign of the gradient, L2 term,
    decay, 1 - beta1, beta2, 1 - beta2, root of the second moment's bias correction, eps, step size.

    Maximising is a negative sign, the absent kind of decay a neutral number, so no variant needs separate code.
    """
    return (
        factor,
        -1.0 if options.maximize else 1.0,
        0.0 if options.decoupled else options.weight_decay,
        1.0 - options.lr * options.weight_decay if options.decoupled else 1.0,
        1.0 - options.beta1,
        options.beta2,
        1.0 - options.beta2,
        math.sqrt(1.0 - options.beta2**step),
        options.eps,
        options.lr / (1.0 - options.beta1**step),
    )


def adam_scalars(
    options: AdamOptions, step: int, factor: float = 1.0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The nine float32 numbers that `adam_rule` needs: `step_numbers`, with one factor and the root's reciprocal.

    Args:
        options: of the parameter group.
        step: number of this step, the first being 1.
        factor: the gradient is multiplied by it first: one over the loss scale, times what clipping leaves.
        device: where the update will run.
    """
    check_step(step, factor)
    factor, sign, *between, root, eps, step_size = step_numbers(options, step, factor)
    return numbers_on(device, (sign * factor, *between, 1.0 / root, eps, step_size), torch.float32)


def numbers_on(device: torch.device | str, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """A few numbers as a tensor on `device`, without a wait for the device.

    `torch.tensor(..., device="cuda")` copies from memory that is not pinned, and so waits for the stream.
    """
    if torch.device(device).type == "cpu":
        return torch.tensor(values, dtype=dtype, device="cpu")
    made = torch.empty(len(values), dtype=dtype, device=device)
    for place, value in enumerate(values):
        made[place].fill_(value)  # a kernel that takes the number as its argument
    return made


def check_step(step: int, factor: float) -> None:
    """Raises `InputError` where a step's number or factor cannot be."""
    if step < 1:
        raise InputError(f"the first step is number 1, got {step}")
    if not math.isfinite(factor):
        raise InputError(f"a gradient cannot be multiplied by {factor}; skip steps whose gradients overflow")


def rounded_root(values: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square roots of float32 values, on every processor.

    On a CPU torch takes those of float32 from a library that rounds some in another way. Roots in double precision are
    close enough to round right.
    """
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()


def adam_rule(
    gradient: torch.Tensor, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New master weights and moments; pure. All but `gradient`, which may be of low precision, are float32.

    Rounds as written, without fused multiply-add, and multiplies by the reciprocal of the second moment's bias
    correction where torch divides; each of the two moves a result by at most a few units in the last place.
    """
    factor, l2, decay, keep1, beta2, keep2, inverse_root2, eps, step_size = scalars.unbind()
    gradient = gradient.float() * factor + master * l2
    exp_avg = exp_avg + (gradient - exp_avg) * keep1
    exp_avg_sq = exp_avg_sq * beta2 + gradient * (gradient * keep2)
    root = rounded_root(exp_avg_sq) * inverse_root2 + eps
    return master * decay - (exp_avg * step_size) / root, exp_avg, exp_avg_sq
