"""The memory that a plan can count on: what other plans at work may still take, and what the least machine has free.

Free memory alone does not tell what a second model may plan with. The first takes activations in its first forward and
states in its first step, long after a second search has read what is free.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elixir.errors import InputError, few, readable_bytes
from elixir.hardware.host_share import host_view
from elixir.hardware.memory import device_name_here, free_device_bytes, free_host_bytes
from elixir.units import format_bytes

UNSTEADY_SHARE = 0.03
"""Share of a need by which the size that suffices is larger: free memory differs when it is read again, and a control
group counts page tables, which are 0.2 % of it, and what else the kernel holds for its processes.

Source: measured; a size without it was refused by some MiB in the next run, and with 1 and with 2 % a run was killed
that otherwise stayed within 1 % of its prediction."""
UNEQUAL = 0.9
"""Machines with less than this share of the free memory of another are unequal; what runs next to a job takes less."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, and bytes of the host for all ranks of one machine together."""

    device_bytes: int
    host_bytes: int


class Promised(Protocol):
    """A plan at work."""

    ranks: int
    """Ranks of the group that share this machine."""
    device: str
    """The device of its compute, such as ``cuda:0`` or ``cpu``; a ``cpu`` has the host's memory."""

    @property
    def promised(self) -> Memory:
        """The peaks of the plan."""

    @property
    def taken(self) -> Memory:
        """The part of it that it holds now."""


_AT_WORK: weakref.WeakSet[Promised] = weakref.WeakSet()


def enter(promise: Promised) -> None:
    """Enters a plan at work, until `leave` or until nobody holds the promise."""
    _AT_WORK.add(promise)


def leave(promise: Promised) -> None:
    """Takes a plan off the reservations; it may be off already."""
    _AT_WORK.discard(promise)


@dataclass(frozen=True)
class Outstanding:
    """The memory that the plans at work may still take, each at least nothing.

    Activations count as not taken: the reservations know what the runtime holds between steps.
    """

    plans: int
    device_bytes: int
    """Bytes of the device that was asked for."""
    host_bytes: int
    """Bytes of the host, by all ranks of this machine; on a ``cpu`` those of devices too."""

    def __str__(self) -> str:
        more = f"{format_bytes(self.device_bytes)} of the device and {format_bytes(self.host_bytes)} of the host"
        return f"models that run under plans in this process ({self.plans}) may still take {more}"


def outstanding(device: str, but: Promised | None = None) -> Outstanding:
    """The memory that living plans, `but` one, were promised and have not taken yet, of `device` (such as ``cuda:0``)
    and of the host."""
    on_device = on_host = 0
    plans = [each for each in _AT_WORK if each is not but]
    for each in plans:
        promised, taken = each.promised, each.taken
        ahead = max(promised.device_bytes - taken.device_bytes, 0)
        on_host += max(promised.host_bytes - taken.host_bytes, 0)
        if each.device == "cpu":
            on_host += ahead * each.ranks
        if each.device == device:
            on_device += ahead
    return Outstanding(len(plans), on_device, on_host)


def refuse_exceeded(needed: Memory, free: Memory, device: str, *, name: str, but: Promised | None = None) -> None:
    """Refuses a plan that takes more memory than is free and not promised to other plans at work in this process.

    Args:
        needed: what the plan still takes: of the device, and of the host for all ranks that share its memory.
        free: what is free now.
        device: on which the plan computes; a ``cpu`` has the host's memory.
        name: of the model, for the error.
        but: the promise to this model, if it is reserved already.

    Raises:
        InputError: says how much is missing, and what to do.
    """
    others = outstanding(device, but)
    wanted = [("host", needed.host_bytes, free.host_bytes - others.host_bytes)]
    if device != "cpu":
        wanted.append(("device", needed.device_bytes, free.device_bytes - others.device_bytes))
    for memory, bytes_needed, available in wanted:
        if bytes_needed > max(available, 0):
            missing = bytes_needed - max(available, 0) + int(UNSTEADY_SHARE * bytes_needed)
            left = f"are free and not promised ({others})" if others.plans else "are free"
            raise InputError(
                f"the plan of {name} takes {readable_bytes(bytes_needed, up=True)} more of {memory} memory, but only "
                f"{readable_bytes(max(available, 0))} {left}: {readable_bytes(missing, up=True)} more suffice. "
                "Free them or raise the limit of the control group; give this plan less with device_memory= and "
                "host_memory=; close() a model that is done, or put several models under one plan with "
                "elixir.together()"
            )


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
        for memory in ("host", "device"):
            here, lowest = (getattr(each, f"{memory}_bytes") for each in (least, free))
            largest = max(getattr(least_free(other), f"{memory}_bytes") for other in machines.values())
            if here == lowest < UNEQUAL * largest:
                found.append(f"has {format_bytes(here)} of {memory} memory free, others up to {format_bytes(largest)}")
        if found:
            said.append(f"{first.name} {' and '.join(found)}")
    return few(said) if said else ""
