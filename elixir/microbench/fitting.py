"""Turns measured points into latency and rate, ``seconds = latency_s + amount / per_s``, and these into a profile.

The fit minimises relative errors, so that a copy of a megabyte counts as much as one of a gigabyte. What it cannot
describe it refuses: too few points, times that say nothing about a rate, or an error beyond `ERROR_LIMIT`.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elixir.errors import InputError
from elixir.hardware.memory import cpu_name, total_host_bytes
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import LARGEST_ALONE, RateFit

ERROR_LIMIT = 0.5
"""A fit that is off by more than this share at any point is left out."""
MIN_POINTS = 3
"""Least number of points, since two fit any line."""
MIN_RATE_SHARE = 0.6
"""Least share of the rate in the time of the largest amount. With less, the amounts were too small to show a rate, or
other work kept the cores busy: threads that wait for a core wait for milliseconds."""
MAX_LATENCY_S = 5e-3
"""Largest latency that is believed: a thread that waits for its turn on a core takes longer to start."""
Found = dict[str, tuple[Any, str]]
"""Field of `HardwareProfile`, or a fit such as ``fits.host_memory`` -> its value and source; without a source, it needs
none."""


@dataclass(frozen=True)
class Series:
    """Measured seconds by amount, for one key of `HardwareProfile.fits`, and the fit, or why there is none."""

    key: str
    points: tuple[tuple[float, float], ...] = ()
    """(amount, median seconds), amounts rising; empty where the measurement itself failed."""
    repeats: int = 0
    """The fewest runs that any of the medians is of."""
    how: str = ""
    """A description of the work that ran."""
    ranks: int = 1
    """How many ranks did so at once."""
    fit: RateFit | None = None
    problem: str = ""

    @property
    def per_s(self) -> float:
        """Rate of large amounts: the fit's; without a fit that of the largest amount, latency and all.

        Raises:
            InputError: nothing was measured.
        """
        if self.fit is not None:
            return self.fit.per_s
        if not self.points:
            raise InputError(f"{self.key} could not be measured: {self.problem}")
        amount, seconds = self.points[-1]
        return amount / seconds

    @property
    def source(self) -> str:
        """Text for `HardwareProfile.sources`."""
        if not self.points:
            return f"not measured: {self.problem}"
        text = f"measured, {len(self.points)} amounts, each the median of {self.repeats} runs or more: {self.how}"
        return text + ("" if self.fit else f"; no fit ({self.problem}), so {LARGEST_ALONE}")

    def fitted(self) -> Series:
        """The same with its fit, or with what says why there is none."""
        try:
            return dataclasses.replace(self, fit=fit_points(self.points))
        except InputError as error:
            return dataclasses.replace(self, problem=str(error))


def fit_points(points: Sequence[tuple[float, float]]) -> RateFit:
    """Finds latency and rate with the least squared relative error over `points` of (amount, seconds).

    Raises:
        InputError: no fit that could be believed; the message says why.
    """
    for amount, seconds in points:
        if not (0 < amount < math.inf and 0 < seconds < math.inf):
            raise InputError(f"amounts and seconds must be above 0 and finite, found {seconds!r} s for {amount!r}")
    if len({amount for amount, _ in points}) < MIN_POINTS:
        raise InputError(f"a fit needs {MIN_POINTS} different amounts or more, found {len(points)} points")
    import numpy as np
    from numpy.polynomial import polynomial

    amounts, seconds_ = np.array(points, dtype=np.float64).T
    latency_s, inverse = polynomial.polyfit(amounts, seconds_, 1, w=1 / seconds_)
    if latency_s < 0:  # then 0 is the best, and the other is the only unknown
        shares = amounts / seconds_
        latency_s, inverse = 0.0, shares.sum() / np.square(shares).sum()
    rate_s = max(inverse, 0.0) * amounts.max()
    if rate_s < MIN_RATE_SHARE * (latency_s + rate_s):
        raise InputError(
            f"seconds hardly grow with the amount: {latency_s / (latency_s + rate_s):.0%} of the largest amount's time "
            "would be latency; measure larger amounts, on a quieter machine"
        )
    if latency_s > MAX_LATENCY_S:
        raise InputError(
            f"a latency of {latency_s * 1e3:.1f} ms is too long, at most {MAX_LATENCY_S * 1e3:g} ms is accepted: other "
            "programs keep the cores busy; measure again on a quieter machine"
        )
    errors = np.abs((latency_s + inverse * amounts) / seconds_ - 1)
    worst = int(errors.argmax())
    if errors[worst] > ERROR_LIMIT:
        raise InputError(
            f"latency and rate do not describe it: off by {errors[worst]:.0%} at {amounts[worst]:.4g}, at most "
            f"{ERROR_LIMIT:.0%} is accepted; measure again on a quieter machine"
        )
    return RateFit(float(latency_s), float(1 / inverse), float(errors[worst]), tuple(points))


def profile_of(name: str, found: Found, base: HardwareProfile | None = None) -> HardwareProfile:
    """A profile measured today.

    Args:
        name: of the profile.
        found: its fields and fits.
        base: has the fields that are not in `found`; None: they are unknown.
    """
    fits = {key[5:]: value for key, (value, _) in found.items() if key.startswith("fits.")}
    values = {field: value for field, (value, _) in found.items() if not field.startswith("fits.")}
    values |= {"name": name, "measured_at": today(), "fits": fits}
    sources = {field: found[field][1] for field in values if field in found and found[field][1]}
    if fits:
        sources["fits"] = "measured: latency and rate with the least squared relative error; each has a separate line"
    sources |= {f"fits.{key}": found[f"fits.{key}"][1] for key in fits}
    if base is None:
        return HardwareProfile(sources=sources, **values)
    return dataclasses.replace(base, sources=base.sources | sources, **values)


def system_facts(device: torch.device) -> Found:
    """Fields that are read, and the same however long the machine is measured."""
    host_bytes = total_host_bytes()
    if device.type == "cpu":
        name, capability = f"{cpu_name()}, {threads_text()}", None
        memory = host_bytes, "read from the operating system: the same memory as the host's"
    else:
        properties = torch.cuda.get_device_properties(device)
        name, capability = properties.name, (properties.major, properties.minor)
        memory = torch.cuda.mem_get_info(device)[1], "read from the driver: total, not free"
    return {
        "host_memory_bytes": (host_bytes, "read from the operating system and its control groups"),
        "device_kind": (device.type, ""),
        "device_name": (name, ""),
        "compute_capability": (capability, "read from the driver" if capability else ""),
        "device_memory_bytes": memory,
    }


def threads_text(count: int | None = None) -> str:
    """How many threads torch uses for one operator; a host rate means little without it."""
    count = torch.get_num_threads() if count is None else count
    return f"{count} thread" + ("s" if count != 1 else "")


def today() -> str:
    """ISO date, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
