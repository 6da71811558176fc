"""Bytes of optimizer state per trained element, by family of optimizer."""

from __future__ import annotations

from elixir.errors import InputTypeError, unknown_name

FP32_BYTES = 4
MASTER_BYTES = FP32_BYTES
"""An fp32 copy of a weight, kept where the weight itself has fewer bits or lies elsewhere than its states."""

_STATE_BYTES = {
    # Two fp32 moments (Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101).
    "Adam": 2 * FP32_BYTES,
    "AdamW": 2 * FP32_BYTES,
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
