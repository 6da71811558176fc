"""How much memory a plan may use: as given, free on this machine, or what the profile promises."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from elixir.errors import InputError
from elixir.hardware.memory import CONTEXT_AND_KERNELS_BYTES, NCCL_BYTES, free_device_bytes, free_host_bytes
from elixir.hardware.process_memory import estimated_bytes
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.promises import Outstanding, outstanding
from elixir.search.propose.sizes import Budgets
from elixir.search.request import FREE_HERE, SearchRequest, Size
from elixir.units import GIB, LARGEST_BYTES, MIB, format_bytes, parse_bytes

logger = logging.getLogger(__name__)

# Reserves: what is kept back of memory whose size nobody gave. A plan fills its budget, and all of this comes on top.
LATE_KERNELS_BYTES = 640 * MIB
"""Bytes of one device: modules that CUDA loads in the first real step (PyTorch's, cuBLAS, attention, Triton). Traces
count cuBLAS's workspaces.

Source: an estimate. CUDA loads modules when they are first used (``CUDA_MODULE_LOADING=LAZY``, which PyTorch sets since
1.13), so free memory that is read before the first step does not know of them. All of PyTorch's are 362 MiB (666.6 less
287.0 MB: pytorch/pytorch#86509); the rest is for other libraries."""
CUDA_CONTEXT_BYTES = CONTEXT_AND_KERNELS_BYTES - LATE_KERNELS_BYTES
"""Bytes of one device that a process holds before its first step. Subtracted from a profile's memory only; free memory
of a real machine is measured.

Source: arithmetic; about 400 MB are usual with lazy loading (pytorch/pytorch#109888)."""
SEGMENT_SLACK_BYTES = 5 * (20 + 2) * MIB
"""Bytes of one device: the unused rest of a large and a small segment for each of five streams: compute, fetches,
gathers, gradients that leave, and new weights that return.

Source: PyTorch's caching allocator, which keeps a pool for each stream and asks the driver for 20 MiB
(``kLargeBuffer``) or 2 MiB (``kSmallBuffer``) at a time."""
FRAGMENTATION_SHARE = 0.05
"""Share of one device's memory that the caching allocator reserves above what is allocated, which is all that a plan
counts. If nothing fits without it, a plan may have it: the allocator gives cached segments back before it fails.

Source: an estimate; ``benchmark/gpu_proof.py`` plans with the same share."""
PAGE_TABLE_SHARE = 2 * 8 / 4096
"""Share of one device's memory: page table entries through which it reaches registered host memory of twice its size.

Source: arithmetic, 8 bytes for each page of 4 KiB."""
SYSTEM_BYTES = 2048 * MIB
"""Bytes of a host that is not here: the operating system and its services.

Source: an estimate."""
PAGE_CACHE_SHARE = 0.05
"""Share of the host's memory, if that is more: the page cache, through which data and checkpoints pass, and page
tables.

Source: an estimate. A host that runs out of memory ends the process, without an error."""
MOST_RESERVED_SHARE = 0.25
"""Largest share of memory, so that a small machine can still plan."""


def resolve_budgets(
    hardware: HardwareProfile,
    request: SearchRequest,
    *,
    unknown_host_bytes: int | None = None,
    on_paper: bool = False,
) -> Budgets:
    """Budgets in bytes. A size that is given is taken as given; of memory whose size is not given a reserve is kept
    back.

    Without a size of device memory it is what is free, if the profile is of this machine, and otherwise what the
    profile says less `CUDA_CONTEXT_BYTES`. Host memory likewise, without a context. On a ``cpu`` profile devices and
    host share one memory: what is not given is split evenly between them, and no device reserve is kept back unless it
    is given. Of what is free here, the memory is left out that other plans at work in this process may still take.

    Of ``host_memory``, which is all that a machine has for the run, its processes take `processes_bytes`, and a plan
    the rest. On a ``cpu`` profile the devices may have that rest, too: only a plan tells what both take together, so
    the planner looks at it again then.

    Args:
        hardware: the machine planned for.
        request: its memory, its reserves and its number of ranks count here.
        unknown_host_bytes: the host memory of a machine whose profile knows none; None: that is an error.
        on_paper: no machine is taken for this one.

    Raises:
        InputError: no size is given and the profile knows none, or other plans were promised all that is free.
    """
    if request.host_memory not in (None, FREE_HERE):
        return _of_machine(hardware, request, on_paper=on_paper)
    ranks = hardware.ranks_per_host(request.world_size)
    on_cpu = hardware.device_kind == "cpu"
    device, host = _given(request.device_memory), _given(request.host_budget)
    kept_of_device, kept_of_host = parse_bytes(request.device_reserve or 0), parse_bytes(request.host_reserve or 0)
    here = not on_paper and is_this_machine(hardware)
    host_here = here or request.host_memory == FREE_HERE
    read: tuple[Literal["device", "host"], ...] = ()
    if device is None and (host_here if on_cpu else here):
        read += ("device",)
    if host is None and host_here:
        read += ("host",)
    left = slack = 0  # of the host's memory, without its reserve
    if host is None or (on_cpu and device is None):
        if host_here:
            others = outstanding("cpu" if on_cpu else _device_here())
            free = free_host_bytes() if request.free is None else request.free.host_bytes
            whole = _left(free, others.host_bytes, "host", others)
        elif hardware.host_memory_bytes is None and unknown_host_bytes is not None:
            whole = unknown_host_bytes
        else:
            whole = _profile_host(hardware)
        if request.host_reserve is None:
            kept_of_host = default_host_reserve(whole, ranks, hardware.device_kind, here=here)
        kept_of_host += ranks * parse_bytes(request.reserve or 0)
        left = max(whole - kept_of_host, 0)
    if on_cpu:
        device, host = _shared(left, ranks, device, host, kept_of_device)
        return Budgets(device, host, device_reserve_bytes=kept_of_device, host_reserve_bytes=kept_of_host, read=read)
    host = left if host is None else host
    if device is None:
        if here:
            others = outstanding(_device_here())
            free = free_device_bytes("cuda") if request.free is None else request.free.device_bytes
            whole = _left(free, others.device_bytes, "device", others)
        else:
            whole = max(hardware.device_memory_bytes - CUDA_CONTEXT_BYTES, 0)
        if request.device_reserve is None:
            kept_of_device = default_device_reserve(whole, request.world_size)
            slack = min(int(FRAGMENTATION_SHARE * whole), kept_of_device)
        device = max(whole - kept_of_device, 0)
    return Budgets(device, host, 0, kept_of_device, kept_of_host, slack, read)


def _of_machine(hardware: HardwareProfile, request: SearchRequest, *, on_paper: bool) -> Budgets:
    """`resolve_budgets` where ``host_memory`` says what a machine has."""
    machine_bytes, other_bytes = parse_bytes(request.host_memory or 0), processes_bytes(hardware, request)
    host_bytes = max(machine_bytes - other_bytes, 0)
    left = replace(request, host_memory=None, host_budget=host_bytes)
    if hardware.device_kind == "cpu":
        device = LARGEST_BYTES if request.device_memory is None else parse_bytes(request.device_memory)
        device = min(device, host_bytes // hardware.ranks_per_host(request.world_size))
        left = replace(left, device_memory=device, device_reserve=None)
    found = resolve_budgets(hardware, left, on_paper=on_paper)
    return replace(found, machine_bytes=machine_bytes, other_bytes=other_bytes)


def processes_bytes(hardware: HardwareProfile, request: SearchRequest) -> int:
    """Bytes of one machine that its processes take without their plans: libraries, programs, and the program's own
    `SearchRequest.reserve`."""
    ranks = hardware.ranks_per_host(request.world_size)
    return estimated_bytes(hardware.device_kind, ranks) + ranks * parse_bytes(request.reserve or 0)


def default_device_reserve(device_bytes: int, world_size: int) -> int:
    """Bytes that are kept back of one CUDA device unless the user says otherwise.

    Args:
        device_bytes: free there, before anything is kept back.
        world_size: number of ranks.
    """
    kept = LATE_KERNELS_BYTES + SEGMENT_SLACK_BYTES + (NCCL_BYTES if world_size > 1 else 0)
    kept += int((FRAGMENTATION_SHARE + PAGE_TABLE_SHARE) * device_bytes)
    return min(kept, int(MOST_RESERVED_SHARE * device_bytes))


def default_host_reserve(host_bytes: int, ranks: int, kind: str = "cuda", *, here: bool = False) -> int:
    """Bytes that are kept back of one host unless the user says otherwise.

    Args:
        host_bytes: free there, before anything is kept back.
        ranks: that share it.
        kind: of the devices.
        here: the processes are at work, so that what they hold now is not among the bytes that are free.
    """
    processes = estimated_bytes(kind, ranks, running=here) + (0 if here else SYSTEM_BYTES)
    return min(max(processes, int(PAGE_CACHE_SHARE * host_bytes)), int(MOST_RESERVED_SHARE * host_bytes))


def disk_budget(hardware: HardwareProfile, disk_memory: Size) -> int:
    """Bytes of the disk of one machine that a plan may use; 0 for None.

    Raises:
        InputError: a size that is none, or the profile does not say how fast the disk is.
    """
    budget = 0 if disk_memory is None else parse_bytes(disk_memory)
    if budget:
        for way in ("disk_read", "disk_write"):
            hardware.rate(way)
    return budget


def warn_if_disk_full(hardware: HardwareProfile, disk_memory: Size) -> bool:
    """Logs a warning where less than that was free when the disk was measured; True if it did."""
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


def host_memory_here(hardware: HardwareProfile) -> str | None:
    """The host budget where neither a machine nor its host memory was named: `FREE_HERE`, which is logged.

    None where `resolve_budgets` finds one itself. A machine that was named gets no memory from here: its plan must not
    depend on where it was made.
    """
    if hardware.device_kind == "cpu" or hardware.host_memory_bytes is not None or is_this_machine(hardware):
        return None
    level = logging.WARNING if on_rank_0() else logging.DEBUG
    logger.log(
        level,
        "no host memory given: planning with what is free of the %s on this machine (host_memory=, --host-memory)",
        format_bytes(free_host_bytes()),
    )
    return FREE_HERE


def on_rank_0() -> bool:
    """Whether this is rank 0, or no process of a group: of lines that all ranks would say, one is enough."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank())


def is_this_machine(hardware: HardwareProfile) -> bool:
    """Whether the profile describes the machine this runs on, as far as names tell."""
    if hardware.device_kind == "cpu":
        return hardware.measured_at is not None or hardware.host_memory_bytes is None
    return torch.cuda.is_available() and torch.cuda.get_device_name() == hardware.device_name


def _given(size: Size) -> int | None:
    return None if size is None else parse_bytes(size)


def _device_here() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _left(free: int, promised: int, memory: str, others: Outstanding) -> int:
    """Free bytes that no other plan in this process was promised."""
    if promised and promised >= free:
        raise InputError(
            f"{format_bytes(free)} of {memory} memory are free, and all of them are promised: {others}; give "
            f"{memory}_memory= to the searches of all models, close() a model that is done, or put the models under "
            "one plan with elixir.together()"
        )
    if promised:
        logger.info("planning with %s of free %s memory: %s", format_bytes(free - promised), memory, others)
    return free - promised


def _profile_host(hardware: HardwareProfile) -> int:
    if hardware.host_memory_bytes is None:
        # About as much as a machine with this device has: the next power of two after twice its memory.
        size = f"{1 << (2 * hardware.device_memory_bytes // GIB).bit_length()}GiB"
        raise InputError(
            f"hardware profile {hardware.name!r} does not say how much host memory its machine has; "
            f"give it: host_memory='{size}', on the command line --host-memory {size}"
        )
    return hardware.host_memory_bytes


def _shared(left: int, ranks: int, device: int | None, host: int | None, kept_of_device: int) -> tuple[int, int]:
    """Budgets of one device and of the host, which have one memory."""
    if host is None:
        host = left // 2 if device is None else max(left - device * ranks, 0)
    if device is None:
        device = max((left - host) // ranks - kept_of_device, 0)
    return device, host
