"""How far rates may be off, and the seconds that a step then takes: an interval, and the worst case of a choice."""

from __future__ import annotations

from dataclasses import replace

from elixir.hardware import HardwareProfile, RateFit

SLOW_HOST_ADAM, FAST_HOST_ADAM = 0.3, 3.0
"""CPU Adam of published offloading runs, over that of the presets: from 0.08 to 1.5, 0.28 in the median."""
SLOW_LINK = 0.6
"""Links over the preset's, where several devices share a switch."""
UNKNOWN_RANGE = (0.72, 1.45)
"""Steps over predicted seconds on a machine of which no run is known: shares that one card's published runs give, taken
for another card (benchmark/published.py, ``card_out``)."""
MEASURED_RANGE = (0.90, 1.12)
"""Likewise on a machine whose rates were measured, as far as kernels and links tell of a whole step."""

_LINKS = ("host_to_device", "device_to_host")
_HOST_ADAM = ("host_adam",)


def with_host_speed(hardware: HardwareProfile, *, host_adam: float = 1.0, link: float = 1.0) -> HardwareProfile:
    """The machine with CPU Adam, and links between host and device, so many times as fast."""
    factors = dict.fromkeys(_HOST_ADAM, host_adam) | dict.fromkeys(_LINKS, link)
    return replace(
        hardware,
        host_adam_numel_per_s=hardware.host_adam_numel_per_s * host_adam,
        host_to_device_bytes_per_s=hardware.host_to_device_bytes_per_s * link,
        device_to_host_bytes_per_s=hardware.device_to_host_bytes_per_s * link,
        fits={key: _scaled(fit, factors.get(key.split(".")[0], 1.0)) for key, fit in hardware.fits.items()},
    )


def worst_case(hardware: HardwareProfile, power: float = 1.0) -> HardwareProfile:
    """The machine at its slowest over CPU Adam x 0.3, 1, 3 and links x 0.6, 1.

    Nothing that gets faster makes a step slower, so no other of these machines has a longer step. With a `power` below
    1 the host is between this one and the profile's.
    """
    return with_host_speed(hardware, host_adam=SLOW_HOST_ADAM**power, link=SLOW_LINK**power)


def extremes(hardware: HardwareProfile) -> tuple[tuple[HardwareProfile, float], tuple[HardwareProfile, float]]:
    """The machine at its fastest and at its slowest, each with the multiple of compute's seconds.

    A machine that was measured has one range for all; otherwise the host is the least certain of it.
    """
    known = hardware.measured_at is not None or hardware.learned is not None
    low, high = hardware.step_range or (MEASURED_RANGE if known else UNKNOWN_RANGE)
    if known:
        fast = with_host_speed(hardware, host_adam=1 / low, link=1 / low)
        return (fast, low), (with_host_speed(hardware, host_adam=1 / high, link=1 / high), high)
    return (with_host_speed(hardware, host_adam=FAST_HOST_ADAM), low), (worst_case(hardware), high)


def _scaled(fit: RateFit, factor: float) -> RateFit:
    return fit if factor == 1.0 else RateFit(fit.latency_s, fit.per_s * factor, fit.error)
