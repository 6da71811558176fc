"""How much memory a plan may use: as given, free on this machine, or what the profile promises."""

from __future__ import annotations

import logging

import torch

from elixir.errors import InputError
from elixir.free_memory import free_device_bytes, free_host_bytes
from elixir.hardware import HardwareProfile
from elixir.search.space import Budgets
from elixir.units import MIB, format_bytes, parse_bytes

logger = logging.getLogger(__name__)

CUDA_CONTEXT_BYTES = 1343 * MIB
"""Device memory that a process holds besides its tensors: the CUDA context and loaded kernels.

Source: Hugging Face, "Model training anatomy" (transformers documentation), which reads it off a data-center GPU right
after the first tensor. Subtracted from a profile's memory only; free memory of a real machine is measured.
"""


def resolve_budgets(
    hardware: HardwareProfile,
    ranks_per_host: int,
    device_memory: str | int | None,
    host_memory: str | int | None,
) -> Budgets:
    """Budgets in bytes.

    Args:
        hardware: the machine planned for.
        ranks_per_host: ranks that share it.
        device_memory: of one device, such as ``"80GiB"``. None: what is free, where this is the machine; else what the
            profile says less `CUDA_CONTEXT_BYTES`.
        host_memory: of the whole machine, all its ranks together. None: likewise, nothing subtracted. On a ``cpu``
            profile devices and host share one memory: what is not given is split evenly between them.

    Raises:
        InputError: a size that is none; or no size is given and the profile knows none.
    """
    device = None if device_memory is None else parse_bytes(device_memory)
    host = None if host_memory is None else parse_bytes(host_memory)
    here = is_this_machine(hardware)
    if hardware.device_kind == "cpu":
        return _shared(hardware, ranks_per_host, device, host, here)
    if device is None:
        if here:
            device = free_device_bytes("cuda")
        else:
            device = max(hardware.device_memory_bytes - CUDA_CONTEXT_BYTES, 0)
    if host is None:
        host = free_host_bytes() if here else _profile_host(hardware)
    return Budgets(device, host)


def disk_budget(hardware: HardwareProfile, disk_memory: str | int | None) -> int:
    """Bytes of the disk of one machine that a plan may use; 0 for None.

    Raises:
        InputError: a size that is none, or the profile does not say how fast the disk is.
    """
    budget = 0 if disk_memory is None else parse_bytes(disk_memory)
    if budget:
        for way in ("disk_read", "disk_write"):
            hardware.rate(way)
    return budget


def warn_if_disk_full(hardware: HardwareProfile, disk_memory: str | int | None) -> bool:
    """Log a warning where less than that was free when the disk was measured; True if it did."""
    budget, free = 0 if disk_memory is None else parse_bytes(disk_memory), hardware.disk_free_bytes
    if free is None or budget <= free:
        return False
    logger.warning(
        "planning with %s of disk, of which %s were free when hardware %r was measured",
        format_bytes(budget),
        format_bytes(free),
        hardware.name,
    )
    return True


def host_memory_here(hardware: HardwareProfile) -> int | None:
    """The host budget in bytes where neither a machine nor its host memory was named: what is free on this one.

    None where `resolve_budgets` finds one itself. A machine that was named gets no memory from here: its plan must not
    depend on where it was made.
    """
    if hardware.device_kind == "cpu" or hardware.host_memory_bytes is not None or is_this_machine(hardware):
        return None
    free_bytes = free_host_bytes()
    logger.warning(
        "no host memory given: planning with the %s that are free on this machine (host_memory=, --host-memory)",
        format_bytes(free_bytes),
    )
    return free_bytes


def is_this_machine(hardware: HardwareProfile) -> bool:
    """Whether the profile describes the machine this runs on, as far as names tell."""
    if hardware.device_kind == "cpu":
        return hardware.measured_at is not None or hardware.host_memory_bytes is None
    return torch.cuda.is_available() and torch.cuda.get_device_name() == hardware.device_name


def _profile_host(hardware: HardwareProfile) -> int:
    if hardware.host_memory_bytes is None:
        raise InputError(
            f"hardware profile {hardware.name!r} does not say how much host memory its machine has; "
            "give it: host_memory='512GiB', on the command line --host-memory 512GiB"
        )
    return hardware.host_memory_bytes


def _shared(
    hardware: HardwareProfile, ranks_per_host: int, device: int | None, host: int | None, here: bool
) -> Budgets:
    if device is not None and host is not None:
        return Budgets(device, host)
    everything = free_host_bytes() if here else _profile_host(hardware)
    if device is None and host is None:
        host = everything // 2
    if device is None:
        device = max(everything - (host or 0), 0) // ranks_per_host
    if host is None:
        host = max(everything - device * ranks_per_host, 0)
    return Budgets(device, host)
