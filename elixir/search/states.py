"""Bytes of optimizer states of what is trained, by family of optimizer and kind of moments."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError, unknown_name
from elixir.moments import FP32_BYTES, StateSize, check_kind, moments_size
from elixir.plan import ADAM_FAMILIES, check_adam

_STATE_BYTES = {
    # Of weights up to float32; `StateSize` knows wider ones.
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


def state_size(optimizer_type: str, moments: str = "float32") -> StateSize:
    """Bytes of optimizer states of a shard, master weights not included.

    Raises:
        InputError, InputTypeError: the family or the kind of moments is unknown, or no name; the family is no Adam and
            its states are wanted in fewer bits.
    """
    name = optimizer_name(optimizer_type)
    if not isinstance(moments, str):
        raise InputTypeError(f"moments is 'float32', 'bfloat16' or '8bit', got {moments!r}")
    kind = check_kind(moments)
    check_adam(name, kind)
    return moments_size(kind) if name in ADAM_FAMILIES else StateSize(_STATE_BYTES[name])


def optimizer_name(optimizer_type: str) -> str:
    """The family's name in its usual spelling.

    Raises:
        InputError, InputTypeError: the family is unknown, or no name.
    """
    if not isinstance(optimizer_type, str):
        raise InputTypeError(f"optimizer_type is a name such as 'Adam', got {optimizer_type!r}")
    found = {name.lower(): name for name in _STATE_BYTES}.get(optimizer_type.lower())
    if found is None:
        raise unknown_name("optimizer type", optimizer_type, _STATE_BYTES)
    return found


def moments_of(optimizer: torch.optim.Optimizer, moments: str | None = None) -> str:
    """How moments are to be kept: as asked for; else as the groups of a `HybridAdam` say; else in float32.

    Raises:
        InputError: the groups say different things, or other than what is asked for.
    """
    said = {str(group["moments"]): None for group in optimizer.param_groups if "moments" in group}
    own = list(said) if any(base.__name__ == "HybridAdam" for base in type(optimizer).__mro__) else []
    if len(own) > 1:
        raise InputError(
            f"a plan keeps all moments alike, but the groups of this HybridAdam have {' and '.join(own)}; give them one"
        )
    if own and moments is not None and own[0] != moments:
        raise InputError(
            f"moments={moments!r} was asked for, but this HybridAdam has {own[0]!r}; make it with moments={moments!r}, or "
            "leave the argument out"
        )
    return own[0] if own else moments or "float32"


def family_of(optimizer: torch.optim.Optimizer) -> str:
    """The family whose states take as much as those of `optimizer`, found by trying a step with its options.

    Options decide, not only the class: RMSprop with momentum keeps as much as Adam.

    Raises:
        InputError: it keeps more state per element than any family that is known.
    """
    names = [base.__name__ for base in type(optimizer).__mro__]
    if "HybridAdam" in names:  # of whatever moments, which `moments_of` tells
        return "Adam"
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
