"""`RateFit`: latency and rate fitted to measured points, and the keys by which a profile keeps such fits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from elixir.artifact import NOT_NEGATIVE, POSITIVE, Bound, check_bounds
from elixir.errors import InputError

PER_S = Bound("from 1 to 1e36 plain bytes, elements or FLOPs a second", 1.0, 1e36)
"""Rates. No part of a machine does less or more, and times that follow from rates between them stay finite."""
DOUBTFUL_ERROR = 0.35
"""Share by which a fit may be off before it is warned of. On an idle machine the worst fit is off by about 0.3; with
other work on its cores one in eight is off by more than this (docs/hardware.md)."""
LARGEST_ALONE = "the rate is that of the largest amount"
"""In the source of a rate whose measurements no fit describes."""

_DTYPE = r"b?float\d+(?:_\w+)?"
_KEY_FORMS = (
    r"(host_to_device|device_to_host)(\.both|\.pageable)?(\.all_ranks)?",
    r"(host_memory|device_to_device)",
    rf"host_adam(\.[1-9]\d*)?(\.{_DTYPE})?(\.all_ranks)?",
    rf"device_adam(\.{_DTYPE})?(\.all_ranks)?",
    rf"matmul\.{_DTYPE}(\.[a-z]+)?",
    rf"(attention|attention_backward|elementwise|activation|reduction)\.{_DTYPE}",
    r"(all_gather|reduce_scatter)\.[1-9]\d*",
    r"(disk_read|disk_write)(\.both)?",
)
"""The form of a key of `HardwareProfile.fits`; docs/appendix/formulas.md lists all keys."""
_KEY = re.compile("|".join(f"(?:{form})" for form in _KEY_FORMS))
PRODUCTS = ("matmul", "attention", "attention_backward")
"""Families of keys whose amounts are FLOPs."""
_PLAINER = {
    "activation": "elementwise.{}",
    "attention_backward": "attention.{}",
    "matmul": "matmul.{}.square",
}
"""Family of keys -> the one key that answers for others of the same dtype."""


def fit_unit(key: str) -> str:
    """The unit of a key's amounts: ``bytes``, ``numel`` (elements) or ``flops``."""
    family = key.split(".", 1)[0]
    if family in PRODUCTS:
        return "flops"
    return "numel" if family.endswith("_adam") else "bytes"


_NAMED = "host_memory host_to_device device_to_host host_adam device_adam disk_read disk_write device_to_device".split()
PLAIN_FIELDS = dict.fromkeys(("elementwise", "activation", "reduction"), "device_memory_bytes_per_s")
PLAIN_FIELDS |= {family: f"{family}_{fit_unit(family)}_per_s" for family in _NAMED}
"""Family of keys -> the field that gives its rate where nothing finer was measured."""


@dataclass(frozen=True)
class RateFit:
    """Seconds for an amount: ``latency_s + amount / per_s``, fitted to measured points.

    Raises:
        InputError: a number is negative, not finite, or zero where it cannot be; the message names the field.
    """

    latency_s: Annotated[float, NOT_NEGATIVE]
    """Seconds before the first byte, element or FLOP; at least 0."""
    per_s: Annotated[float, PER_S]
    """Bytes, elements or FLOPs per second of large amounts; above 0."""
    error: Annotated[float, NOT_NEGATIVE]
    """Largest relative error of the fit over the measured points, as a share."""
    points: tuple[tuple[Annotated[float, POSITIVE], Annotated[float, POSITIVE]], ...] = ()
    """(amount, measured seconds)."""

    def __post_init__(self) -> None:
        check_bounds(self, "field '{}' of a fit")
        for index, point in enumerate(self.points):
            if len(point) != 2:
                raise InputError(f"field 'points[{index}]' of a fit must be (amount, seconds), found {point!r}")

    def seconds(self, amount: float) -> float:
        """Seconds for `amount`, in the unit that `per_s` counts.

        Raises:
            InputError: the amount is negative or not finite.
        """
        if not 0 <= amount < math.inf:
            raise InputError(f"an amount of work must be finite and at least 0, found {amount!r}")
        return self.latency_s + amount / self.per_s


def plainer_keys(key: str) -> list[str]:
    """Keys that answer for `key` where it was not measured, the nearest first."""
    words = key.split(".")
    if words[0] in _PLAINER and words[-1] != "all_ranks":
        return [_PLAINER[words[0]].format(words[1])]
    # Nor need what was measured by one rank alone have been measured in every form.
    return [".".join(words[:count]) for count in range(len(words) - 1, 0, -1)]


def check_key(key: object) -> None:
    """Raises `InputError` where `key` is none that a fit can have."""
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise InputError(
            f"{key!r} is no key of hardware fits; expected such as 'host_to_device', 'device_to_host.both', "
            "'host_adam.2', 'matmul.bfloat16.square', "
            "'attention.bfloat16', 'all_gather.8' (docs/appendix/formulas.md lists them)"
        )
