"""Rules that make meta tensors behave as on the target device: attention, autocast, allocator, sums of gradients.

`common` has what holds for every device, `cuda` and `cpu` what holds for one kind.
"""

from __future__ import annotations

from elixir.hardware.profile import HardwareProfile
from elixir.tracer.device.cpu_target import CpuTarget
from elixir.tracer.device.cuda_target import CudaTarget
from elixir.tracer.device.target import Target


def target_for(hardware: HardwareProfile) -> Target:
    """The rules for a machine."""
    return CudaTarget(hardware) if hardware.device_kind == "cuda" else CpuTarget(hardware)
