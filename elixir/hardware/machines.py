"""`MachineView`: the memory that each rank finds on its machine. One plan for all has to fit the least of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elixir.errors import few
from elixir.hardware.host_share import host_view
from elixir.hardware.memory import device_name_here, free_device_bytes, free_host_bytes
from elixir.hardware.promises import Memory
from elixir.units import format_bytes

UNEQUAL = 0.9
"""Machines with less than this share of the free memory of another are unequal; what runs next to a job takes less."""


@dataclass(frozen=True)
class MachineView:
    """A machine as one rank sees it."""

    machine: str
    """A name that all ranks of a machine share, and no other machine has."""
    name: str
    """The name that people know it by."""
    device: str | None
    free: Memory

    @classmethod
    def here(cls, device: torch.device) -> MachineView:
        """The machine of this process, which computes on `device`; raises as `free_device_bytes`."""
        free = Memory(free_device_bytes(device), free_host_bytes())
        return cls(host_view().host, socket.gethostname(), device_name_here(device.type), free)


def least_free(views: Sequence[MachineView]) -> Memory:
    """The memory that every rank has at least."""
    frees = [view.free for view in views]
    return Memory(min(free.device_bytes for free in frees), min(free.host_bytes for free in frees))


def unequal(views: Sequence[MachineView]) -> str:
    """Names the machines that have other devices, fewer ranks or less memory than others; empty if there are none."""
    if not views:
        return ""
    machines: dict[str, list[MachineView]] = {}
    for view in views:
        machines.setdefault(view.machine, []).append(view)
    most, free = max(map(len, machines.values())), least_free(views)
    said = []
    for of_machine in machines.values():
        least, first = least_free(of_machine), of_machine[0]
        found = [] if first.device == views[0].device else [f"is a {first.device}, the first a {views[0].device}"]
        if len(of_machine) < most:
            found.append(f"has {len(of_machine)} of the ranks, others {most}")
        for memory, here, lowest in (
            ("host", least.host_bytes, free.host_bytes),
            ("device", least.device_bytes, free.device_bytes),
        ):
            largest = max(getattr(least_free(other), f"{memory}_bytes") for other in machines.values())
            if here == lowest < UNEQUAL * largest:
                found.append(f"has {format_bytes(here)} of {memory} memory free, others up to {format_bytes(largest)}")
        if found:
            said.append(f"{first.name} {' and '.join(found)}")
    return few(said) if said else ""
