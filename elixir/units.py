"""Sizes, dtypes and ranges of numbers as people write them, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from elixir.errors import InputError, shortened, unknown_name

if TYPE_CHECKING:
    import torch

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

_TRAINED = {
    "fp32": "float32", "float32": "float32", "float": "float32",
    "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp16": "float16", "float16": "float16", "half": "float16",
    "fp64": "float64", "float64": "float64", "double": "float64",
}  # fmt: skip

_ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""An element of the usual dtypes; torch, whose import takes seconds, is asked for others."""


def parse_bytes(text: str | int) -> int:
    """Bytes of ``128GiB``, ``80GB``, ``512M`` (binary) or a plain number of bytes; in text that is 1 MiB or more.

    Raises:
        InputError: the text is no size, or lacks its unit, or the size is negative or above `LARGEST_BYTES`.
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
    size = int(Fraction(match[1]) * _SUFFIX_BYTES[match[2].lower()])
    if not match[2] and 0 < size < MIB:  # nobody has so little: the unit was forgotten
        number = text.strip()
        raise InputError(
            f"a size of {number} without a unit would be {number} bytes; write {number}GiB, or {number}B for bytes"
        )
    return _bounded(size, text)


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
    import torch

    if isinstance(dtype, torch.dtype):
        if dtype_name(dtype) not in _TRAINED:
            raise InputError(f"{dtype} cannot be trained in; give float32, bfloat16, float16 or float64")
        return dtype
    name = _TRAINED.get(str(dtype).lower().removeprefix("torch."))
    if name is None:
        raise unknown_name("dtype", str(dtype), _TRAINED)
    found: torch.dtype = getattr(torch, name)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_dtype_name(name: object) -> bool:
    """True for canonical names only: an alias such as ``half`` would never be looked up."""
    if not isinstance(name, str):
        return False
    dtype = None if name in _ITEM_BYTES else _torch_dtype(name)
    return name in _ITEM_BYTES or (dtype is not None and dtype_name(dtype) == name)


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a dtype given by its torch name, such as ``bfloat16`` or ``int64``."""
    if name in _ITEM_BYTES:
        return _ITEM_BYTES[name]
    dtype = _torch_dtype(name)
    if dtype is None:
        raise InputError(f"{name!r} is no torch dtype")
    return dtype.itemsize


def _torch_dtype(name: str) -> torch.dtype | None:
    import torch

    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def number_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each range of successive numbers, which are given in rising order.

    >>> number_ranges((0, 1, 2, 8, 10, 11))
    [(0, 2), (8, 8), (10, 11)]
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return [(run[0], run[-1]) for run in runs]
