"""`HardwareProfile`: what one machine can do. This module holds data.

Profiles come from three places: a preset (`preset`, published numbers with their sources), a JSON file
(`load_hardware`), or a measurement (`elixir.microbench.measure`). Nothing here measures speed or allocates memory.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from elixir.artifact import Artifact, digest
from elixir.errors import InputError, InputTypeError, unknown_name
from elixir.hardware_presets import PRESETS

_POSITIVE_FIELDS = (
    "devices_per_host",
    "device_memory_bytes",
    "device_memory_bytes_per_s",
    "matmul_efficiency",
    "host_memory_bytes_per_s",
    "host_to_device_bytes_per_s",
    "device_to_host_bytes_per_s",
    "device_to_device_bytes_per_s",
    "host_adam_numel_per_s",
    "device_adam_numel_per_s",
)


@dataclass(frozen=True)
class HardwareProfile(Artifact):
    """One machine: its devices, its host, the links between them.

    Links and Adam rates are what a program reaches. FLOP/s and memory bandwidth of a preset are published peaks, the
    former brought down by `matmul_efficiency`; a measured profile has reached rates throughout. `sources` tells.

    `None` means unknown; the search then names the field it needs.

    Raises:
        InputError: a number is not positive and finite, the efficiency is not in (0, 1], the device kind is neither
            ``cuda`` nor ``cpu``, or a dtype is none of torch's; the message names the field.
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
    """Of one device, as PyTorch reports it. On a ``cpu`` machine this is the host's memory, not memory beside it."""
    device_memory_bytes_per_s: float
    """Bandwidth of the device's own memory."""
    flops_per_s: dict[str, float]
    """Dense peak by torch dtype name, such as ``bfloat16``."""
    matmul_efficiency: float
    """Share of `flops_per_s` that large matrix products reach, above 0 and at most 1."""
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

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("hardware field 'name' must not be empty")
        if self.device_kind not in ("cuda", "cpu"):
            raise InputError(f"hardware field 'device_kind' must be 'cuda' or 'cpu', found {self.device_kind!r}")
        for name in _POSITIVE_FIELDS:
            _check_positive(name, getattr(self, name))
        if self.host_memory_bytes is not None:
            _check_positive("host_memory_bytes", self.host_memory_bytes)
        if self.matmul_efficiency > 1:
            raise InputError(
                f"hardware field 'matmul_efficiency' is a share above 0 and at most 1, found {self.matmul_efficiency}"
            )
        self._check_capability()
        if not self.flops_per_s:
            raise InputError("hardware field 'flops_per_s' must give a rate for at least one dtype, found none")
        for dtype, rate in self.flops_per_s.items():
            if not _is_dtype_name(dtype):
                raise InputError(
                    f"hardware field 'flops_per_s' has {dtype!r}, which is no torch dtype name such as 'bfloat16'"
                )
            _check_positive(f"flops_per_s.{dtype}", rate)
        if self.measured_at is not None:
            try:
                datetime.date.fromisoformat(self.measured_at)
            except (TypeError, ValueError):
                raise InputError(
                    f"hardware field 'measured_at' must be a date such as '2026-01-31', found {self.measured_at!r}"
                ) from None

    def _check_capability(self) -> None:
        capability = self.compute_capability
        if self.device_kind == "cpu" and capability is not None:
            raise InputError(f"hardware field 'compute_capability' must be null for a cpu, found {capability}")
        if self.device_kind == "cuda" and (
            capability is None or len(capability) != 2 or min(capability) < 0 or capability[0] < 1
        ):
            raise InputError(
                f"hardware field 'compute_capability' must be (major, minor) for a cuda device, found {capability}"
            )

    @property
    def fingerprint(self) -> str:
        """Identifies the numbers, not their sources."""
        data = self.to_dict()
        return digest({key: value for key, value in data.items() if key not in ("sources", "measured_at")})

    def flops_rate(self, dtype: str) -> float:
        """FLOP/s that large matrix products in `dtype` (a torch name, such as ``bfloat16``) reach on one device.

        Raises:
            InputError: the profile has no rate for this dtype.
        """
        if dtype not in self.flops_per_s:
            known = ", ".join(sorted(self.flops_per_s))
            raise InputError(
                f"hardware {self.name!r} has no FLOP/s for dtype {dtype!r}; it has {known}. Choose one of these, "
                f"or add the dtype to 'flops_per_s' in a JSON profile"
            )
        return self.flops_per_s[dtype] * self.matmul_efficiency


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows: data centre, desktop, small and shared devices, then ``cpu``."""
    return tuple(PRESETS)


def preset(name: str) -> HardwareProfile:
    """The preset machine `name` (case does not matter), every number with its source.

    Raises:
        InputError: there is no such preset; the message suggests the nearest names.
    """
    if not isinstance(name, str):
        raise InputTypeError(f"hardware is named by text such as 'h200', got {type(name).__name__}")
    entry = PRESETS.get(name.lower())
    if entry is None:
        raise unknown_name("hardware", name, PRESETS)
    values: dict[str, Any] = {key: quoted.value for key, quoted in entry.items()}
    values["flops_per_s"] = dict(values["flops_per_s"])
    sources = {key: quoted.source for key, quoted in entry.items() if quoted.source}
    return HardwareProfile(name=name.lower(), sources=sources, **values)


def load_hardware(text: str) -> HardwareProfile:
    """A profile from what a user writes: a preset's name, or the path of a JSON profile (ending in ``.json``).

    Raises:
        InputError: an unknown name.
        ArtifactError: the file cannot be read or is no hardware profile.
    """
    if isinstance(text, str) and text.lower().endswith(".json"):
        return HardwareProfile.load(text)
    return preset(text)


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InputError(f"hardware field '{name}' must be a positive finite number, found {value!r}")


def _is_dtype_name(name: str) -> bool:
    """True for canonical names only: an alias such as ``half`` would never be looked up."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
