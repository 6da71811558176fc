"""Bytes of optimizer state per trained element, by family of optimizer."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError, unknown_name

FP32_BYTES = 4
MASTER_BYTES = FP32_BYTES
"""An fp32 copy of a weight, kept where the weight itself has fewer bits or lies elsewhere than its states."""

_STATE_BYTES = {
    # Two fp32 moments (Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101).
    "Adam": 2 * FP32_BYTES,
    "AdamW": 2 * FP32_BYTES,
    # Adam's two, and the largest second moment so far (Reddi et al., ICLR 2018): ``amsgrad=True``.
    "AMSGrad": 3 * FP32_BYTES,
    # One fp32 momentum buffer.
    "SGD": FP32_BYTES,
    # One fp32 sum of squares (Duchi et al., JMLR 12, 2011).
    "Adagrad": FP32_BYTES,
    # One fp32 average of squares, without momentum and centering.
    "RMSprop": FP32_BYTES,
    # One fp32 moment (Chen et al., arXiv:2302.06675).
    "Lion": FP32_BYTES,
}


def state_bytes_per_numel(optimizer_type: str) -> int:
    """Bytes of optimizer states per trained element, master weight not included.

    Raises:
        InputError, InputTypeError: the family is unknown, or no name.
    """
    if not isinstance(optimizer_type, str):
        raise InputTypeError(f"optimizer_type is a name such as 'Adam', got {optimizer_type!r}")
    by_lower = {name.lower(): size for name, size in _STATE_BYTES.items()}
    size = by_lower.get(optimizer_type.lower())
    if size is None:
        raise unknown_name("optimizer type", optimizer_type, _STATE_BYTES)
    return size


def optimizer_name(optimizer_type: str) -> str:
    """The family's name in its usual spelling; `InputError` where it is unknown."""
    state_bytes_per_numel(optimizer_type)
    return next(name for name in _STATE_BYTES if name.lower() == optimizer_type.lower())


def family_of(optimizer: torch.optim.Optimizer) -> str:
    """The family whose states take as much as those of `optimizer`, found by trying a step with its options.

    Options decide, not only the class: RMSprop with momentum keeps as much as Adam.

    Raises:
        InputError: it keeps more state per element than any family that is known.
    """
    names = [base.__name__ for base in type(optimizer).__mro__]
    trial = nn.Parameter(torch.zeros(256))
    trial.grad = torch.ones_like(trial)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    accepted = inspect.signature(type(optimizer)).parameters
    made = type(optimizer)(
        [{**options, "params": [trial]}], **{k: v for k, v in optimizer.defaults.items() if k in accepted}
    )
    try:
        made.step()
    except Exception as error:
        named = [name for name in names if name in _STATE_BYTES]
        if named:
            return named[0]
        raise InputError(
            f"{names[0]} cannot step one weight by itself ({error}), so it is not elementwise; use an elementwise optimizer "
            "such as AdamW, SGD, RMSprop or Adagrad"
        ) from error
    kept = sum(v.nbytes for v in made.state[trial].values() if isinstance(v, torch.Tensor) and v.numel() > 1)
    per_numel = kept / trial.numel()
    for name in names:
        # Plain SGD keeps nothing, and is still SGD.
        if _STATE_BYTES.get(name) == per_numel or (name == "SGD" and not kept):
            return name
    fitting = [name for name, size in _STATE_BYTES.items() if size >= per_numel]
    if not fitting:
        raise InputError(
            f"{names[0]} keeps {per_numel:.0f} bytes of state per element, more than any family that plans are made for "
            f"({', '.join(_STATE_BYTES)}); use one of these"
        )
    return min(fitting, key=lambda name: _STATE_BYTES[name])
