"""`HardwareProfile`: what one machine can do. This module only holds data; `elixir.microbench` measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from elixir.artifact import Artifact, digest


@dataclass(frozen=True)
class HardwareProfile(Artifact):
    """One machine: its devices, its host, the links between them. Rates are what a program reaches, not slogans.

    `None` means unknown; the search then names the field it needs.
    """

    artifact: ClassVar[str] = "hardware_profile"
    schema_version: ClassVar[int] = 1

    name: str
    """Short name, such as ``h200``."""
    device_kind: str
    """``cuda`` or ``cpu``."""
    device_name: str
    compute_capability: tuple[int, int] | None
    """(major, minor) of a CUDA device, else None."""
    devices_per_host: int
    device_memory_bytes: int
    """Of one device, as its driver reports it."""
    device_memory_bytes_per_s: float
    """Bandwidth of the device's own memory."""
    flops_per_s: dict[str, float]
    """Dense peak by torch dtype name, such as ``bfloat16``."""
    matmul_efficiency: float
    """Share of `flops_per_s` that large matrix products reach, 0 to 1."""
    host_memory_bytes: int | None
    """Of the whole machine."""
    host_memory_bytes_per_s: float
    """Bandwidth of host memory, all cores together."""
    host_to_device_bytes_per_s: float
    """One device alone, from pinned memory."""
    device_to_host_bytes_per_s: float
    device_to_device_bytes_per_s: float
    """Between devices of one machine, per device and direction."""
    host_adam_numel_per_s: float
    """Elements per second of a fused Adam over fp32 states on the host, all cores together."""
    device_adam_numel_per_s: float
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number comes from: a publication, or how it was measured."""
    measured_at: str | None = None
    """ISO date of the measurement; None for a preset."""

    @property
    def fingerprint(self) -> str:
        """Identifies the numbers, not their sources."""
        data = self.to_dict()
        return digest({key: value for key, value in data.items() if key not in ("sources", "measured_at")})
