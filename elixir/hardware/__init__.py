"""A machine's abilities: `HardwareProfile`, presets with their sources, free memory, cores."""

from elixir.hardware.profile import HardwareProfile, load_hardware, preset, preset_names

__all__ = ["HardwareProfile", "load_hardware", "preset", "preset_names"]
