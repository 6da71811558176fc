"""`Scenario`: one set of rates and circumstances that a profile thinks possible.

A profile says which of its rates may be lower than it has them, and how often steps keep states that the host made
early. `scenarios` has every combination. Plans are judged by all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import PLAIN_FIELDS, RateFit

SLOW_HOST_ADAM, FAST_HOST_ADAM = 0.3, 3.0
"""CPU Adam of published offloading runs, over that of the presets: from 0.08 to 1.5, 0.28 in the median."""
SLOW_LINK = 0.6
"""Links over the preset's, where several devices share a switch."""
UNKNOWN_RANGE = (0.72, 1.45)
"""Steps over predicted seconds on a machine of which no run is known: shares that one card's published runs give, taken
for another card (benchmark/published.py, ``card_out``)."""
MEASURED_RANGE = (0.90, 1.12)
"""The same range on a machine whose rates were measured, as far as kernels and links tell of a whole step."""
KNOWN = 0.97
"""A rate that may be so much of the profile's is known. Likewise of steps that keep early states, or discard them."""

_LINKS = ("host_to_device", "device_to_host")
_HOST_ADAM = ("host_adam",)


@dataclass(frozen=True)
class Scenario:
    """One set of rates, as parts of the profile's, and circumstances."""

    host_adam: float = 1.0
    """CPU Adam."""
    link: float = 1.0
    """Links between host and device, either way."""
    clipped: bool = False
    """Whether every step is clipped, so that it discards states made early and makes them again."""

    def __str__(self) -> str:
        parts = (
            "CPU Adam is slow" * (self.host_adam != 1),
            "links are slow" * (self.link != 1),
            "every step is clipped" * self.clipped,
        )
        return " and ".join(part for part in parts if part) or "all is as the profile says"

    def differences(self, other: Scenario) -> int:
        """How many fields are others."""
        return sum((self.host_adam != other.host_adam, self.link != other.link, self.clipped != other.clipped))

    def machine(self, hardware: HardwareProfile) -> HardwareProfile:
        """The machine with these rates."""
        if self.host_adam == self.link == 1.0:
            return hardware
        factors = dict.fromkeys(_HOST_ADAM, self.host_adam) | dict.fromkeys(_LINKS, self.link)
        return scaled(hardware, factors)


def scenarios(hardware: HardwareProfile, *, clips: bool) -> tuple[Scenario, ...]:
    """All that the profile thinks possible, the nominal one first.

    Args:
        hardware: the machine.
        clips: whether the run clips gradients by their norm; without, early states are kept.
    """
    # On a CPU, host and device are the same cores and memory, so no plan can depend on how these compare.
    slow_adam, slow_link = slowest_rates(hardware) if hardware.device_kind == "cuda" else (1.0, 1.0)
    kept = hardware.early_kept
    clipped: tuple[bool, ...] = (False, True)
    if not clips or (kept is not None and kept >= KNOWN):
        clipped = (False,)
    elif kept is not None and kept <= 1 - KNOWN:
        clipped = (True,)
    adam, link = ((1.0, slow) if slow < KNOWN else (1.0,) for slow in (slow_adam, slow_link))
    return tuple(Scenario(a, b, c) for c, b, a in itertools.product(clipped, link, adam))


def unmeasured(hardware: HardwareProfile) -> frozenset[str]:
    """Fields of `Scenario` of which a measurement or a run would tell more than the profile knows."""
    measured = {"host_adam": hardware.host_adam_least, "link": hardware.link_least, "clipped": hardware.early_kept}
    return frozenset(name for name, known in measured.items() if known is None)


def slowest_rates(hardware: HardwareProfile) -> tuple[float, float]:
    """The parts of its rates that CPU Adam, and links, may turn out to have.

    Of a preset little is known, and a machine that was measured is as uncertain as its own fits are. Runs leave nothing
    to be learned of what they used: see `elixir.hardware.learning.learn`.
    """
    found = (SLOW_HOST_ADAM, SLOW_LINK)
    if hardware.measured_at is not None:
        found = (_least(hardware, _HOST_ADAM), _least(hardware, _LINKS))
    said = (hardware.host_adam_least, hardware.link_least)
    slow_adam, slow_link = (rate if known is None else known for rate, known in zip(found, said, strict=True))
    return slow_adam, slow_link


def extremes(hardware: HardwareProfile) -> tuple[tuple[Scenario, float], tuple[Scenario, float]]:
    """The machine at its fastest and at its slowest, each with the multiple of compute's seconds.

    A machine that was measured, or of which steps are known, has one range for all, but for what these have not used;
    otherwise the host is the least certain of it.
    """
    learned = hardware.learned is not None and hardware.learned.steps > 0
    known = hardware.measured_at is not None or learned
    slow_adam, slow_link = slowest_rates(hardware)
    low, high = hardware.step_range or (MEASURED_RANGE if known else UNKNOWN_RANGE)
    if known:
        return (Scenario(1 / low, 1 / low), low), (Scenario(min(1 / high, slow_adam), min(1 / high, slow_link)), high)
    return (Scenario(FAST_HOST_ADAM), low), (Scenario(slow_adam, slow_link), high)


def _least(hardware: HardwareProfile, families: tuple[str, ...]) -> float:
    """The part of its rate that the worst fit of measured points leaves."""
    errors = [fit.error for key, fit in hardware.fits.items() if key.split(".")[0] in families]
    return 1 / (1 + max(errors, default=0.0))


def scaled(hardware: HardwareProfile, factors: Mapping[str, float]) -> HardwareProfile:
    """The machine with rates of other speeds: factors by family of keys; latencies stay."""
    fields = {PLAIN_FIELDS[key]: factor for key, factor in factors.items() if key in PLAIN_FIELDS}
    known = {name: (getattr(hardware, name), factor) for name, factor in fields.items()}
    rates: dict[str, Any] = {name: rate * factor for name, (rate, factor) in known.items() if rate is not None}
    fits = {key: _faster(fit, factors.get(key.split(".")[0], 1.0)) for key, fit in hardware.fits.items()}
    return replace(hardware, fits=fits, **rates)


def _faster(fit: RateFit, factor: float) -> RateFit:
    return fit if factor == 1.0 else RateFit(fit.latency_s, fit.per_s * factor, fit.error)
