"""A machine's abilities: `HardwareProfile`, presets with their sources, free memory, cores."""

from __future__ import annotations

from elixir.hardware.fits import LARGEST_ALONE, RateFit, fit_unit, plainer_keys
from elixir.hardware.learning import learn
from elixir.hardware.memory import cpu_name, device_name_here, free_device_bytes, free_host_bytes, total_host_bytes
from elixir.hardware.own_threads import use_threads
from elixir.hardware.profile import (
    IF_DOUBTFUL,
    HardwareProfile,
    doubtful_rates,
    load_hardware,
    other_device,
    preset,
    preset_names,
    warn_if_doubtful,
    warn_if_other_device,
)
from elixir.hardware.scenario import Scenario, extremes, scenarios, slowest_rates
from elixir.hardware.threads import (
    HostShare,
    HostView,
    adam_threads,
    binds,
    check_host_threads,
    core_list,
    enough_threads,
    host_share,
    host_view,
    quota_cores,
    rank_threads,
)

__all__ = [
    "IF_DOUBTFUL",
    "LARGEST_ALONE",
    "HardwareProfile",
    "HostShare",
    "HostView",
    "RateFit",
    "Scenario",
    "adam_threads",
    "binds",
    "check_host_threads",
    "core_list",
    "cpu_name",
    "device_name_here",
    "doubtful_rates",
    "enough_threads",
    "extremes",
    "fit_unit",
    "free_device_bytes",
    "free_host_bytes",
    "host_share",
    "host_view",
    "learn",
    "load_hardware",
    "other_device",
    "plainer_keys",
    "preset",
    "preset_names",
    "quota_cores",
    "rank_threads",
    "scenarios",
    "slowest_rates",
    "total_host_bytes",
    "use_threads",
    "warn_if_doubtful",
    "warn_if_other_device",
]
