"""Sizes and dtypes as people write them, and back."""

from __future__ import annotations

import re
from fractions import Fraction

import torch

from elixir.errors import InputError, shortened, unknown_name

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
LARGEST_BYTES = 2**60
"""Sums of a few of these still fit 64-bit integers, with which plans are computed."""

_SUFFIX_BYTES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip

_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
    "fp64": torch.float64, "float64": torch.float64, "double": torch.float64,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Bytes of ``128GiB``, ``80GB``, ``512M`` (binary) or a plain number of bytes.

    Raises:
        InputError: the text is no size, or the size is negative or above `LARGEST_BYTES`.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise InputError(f"a size is a number of bytes or text such as '128GiB', got {text!r}")
    if isinstance(text, int):
        if text < 0:
            raise InputError(f"a size cannot be negative, got {text}")
        return _bounded(text, str(text))
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _SUFFIX_BYTES:
        raise InputError(
            f"{shortened(repr(text))} is no size; write a number and a unit, such as 128GiB, 80GB or 512MiB"
        )
    # Not by way of float, which is exact only up to 2**53.
    return _bounded(int(Fraction(match[1]) * _SUFFIX_BYTES[match[2].lower()]), text)


def _bounded(size: int, text: str) -> int:
    if size > LARGEST_BYTES:
        raise InputError(f"a size is at most 1 EiB, got {shortened(text)}")
    return size


def format_bytes(amount_bytes: float) -> str:
    """Writes bytes for people, in the largest binary unit that leaves at least one digit before the point."""
    for unit, size in (("TiB", TIB * 10), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(amount_bytes) >= size:
            scale = TIB if unit == "TiB" else size
            return f"{amount_bytes / scale:.2f} {unit}"
    return f"{amount_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Writes seconds for people, or a smaller unit if three decimals of a second would hide too much."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size / 100 or seconds == 0:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds / 1e-6:.3f} us"


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype to train in, for ``bf16``, ``float32``, ... or a dtype itself; `InputError` for anything else."""
    if isinstance(dtype, torch.dtype):
        if dtype not in _DTYPES.values():
            raise InputError(f"{dtype} cannot be trained in; give float32, bfloat16, float16 or float64")
        return dtype
    found = _DTYPES.get(str(dtype).lower().removeprefix("torch."))
    if found is None:
        raise unknown_name("dtype", str(dtype), _DTYPES)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a dtype given by its torch name, such as ``bfloat16`` or ``int64``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"{name!r} is no torch dtype")
    return dtype.itemsize
