"""How much memory this machine has left, which is the budget that nobody gave; what its devices are called; and the
control groups above this process, which limit what it may use.

Reads what the driver and the operating system say; allocates nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from elixir.errors import InputError
from elixir.units import MIB, parse_bytes

CONTEXT_AND_KERNELS_BYTES = 1343 * MIB
"""Device memory that a process holds in addition to its tensors: the CUDA context and all kernels of PyTorch.

Source: Hugging Face, "Model training anatomy" (transformers documentation), which reads it off a data-center GPU right
after the first tensor, with a CUDA that loaded all kernels at once.
"""
NCCL_BYTES = 512 * MIB
"""Bytes of one device, with several ranks: buffers of NCCL's communicators.

Source: an estimate, from 4 MiB (``NCCL_BUFFSIZE``) and the smaller buffers of the other protocols, for 32 channels and
both directions of a ring."""

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def free_device_bytes(device: torch.device | str | int) -> int:
    """Bytes that this process could still allocate on `device`: free ones and those its own allocator keeps cached.

    For ``cpu`` this is `free_host_bytes`. On CUDA it creates this process's context, as the first use of a device does.

    Raises:
        InputError: no such device, or one that is neither CUDA nor CPU.
    """
    target = check_device(device)
    if target.type == "cpu":
        return free_host_bytes()
    index = target.index
    free_bytes, _ = torch.cuda.mem_get_info(index)
    cached_bytes = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return int(free_bytes + cached_bytes)


def free_host_bytes() -> int:
    """Bytes of host memory that this process could still use without swapping, its control groups' limits respected.

    Raises:
        InputError: the operating system does not tell; give the size instead.
    """
    available_kib = _number(_MEMINFO, "MemAvailable:")
    available = _sysconf_bytes("SC_AVPHYS_PAGES") if available_kib is None else available_kib * 1024
    if available is None:
        raise InputError("this operating system does not report free memory; give the host memory as a size")
    return max(0, min([available, *(limit - used for limit, used in _cgroup_memory())]))


def total_host_bytes() -> int:
    """Bytes of host memory of this machine, or the smallest control group limit this process runs under.

    Raises:
        InputError: the operating system does not tell.
    """
    total = _sysconf_bytes("SC_PHYS_PAGES")
    if total is None:
        raise InputError("this operating system does not report its memory size; give the host memory as a size")
    return min([total, *(limit for limit, _ in _cgroup_memory())])


def cache_bytes(device: torch.device | str, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The last-level caches of all CPUs together, or that of a CUDA device, as the kernel or the driver tells; 0 where
    they do not."""
    target = check_device(device)
    if target.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(target), "L2_cache_size", 0))
    levels: dict[int, dict[str, int]] = {0: {}}  # -> of each group of CPUs that share one
    for folder in root.glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, shared = ((folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            levels.setdefault(int(level), {})[shared] = parse_bytes(size)
        except (OSError, ValueError):
            continue
    return sum(levels[max(levels)].values())


def device_name_here(kind: str) -> str | None:
    """The name of this machine's device of `kind` (``cuda`` or ``cpu``), as `HardwareProfile.device_name` has it.

    Of a machine without a CUDA device it is the CPU's name either way. None where the driver does not answer.
    """
    if kind == "cuda" and torch.cuda.is_available():
        try:
            return torch.cuda.get_device_name()
        except RuntimeError:  # such as in a process forked after CUDA was used
            return None
    return cpu_name()


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """Model and number of usable cores, such as ``AMD EPYC, 2 cores``; never empty."""
    model = ""
    with contextlib.suppress(OSError):  # not Linux: platform knows, if less well
        match = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
        model = match[1].strip() if match else ""
    model = model or platform.processor() or platform.machine() or "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{model}, {cores} cores"


def check_device(device: torch.device | str | int) -> torch.device:
    """`device` as a `torch.device`, CUDA with an index; `InputError` where this machine has none such."""
    try:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"{device!r} is no device; write 'cuda', 'cuda:0' or 'cpu'") from None
    if target.type == "cpu":
        return target
    if target.type != "cuda":
        raise InputError(f"expected a device of cuda or the cpu, found {target.type!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = target.index if target.index is not None else torch.cuda.current_device() if count else 0
    if index >= count:
        raise InputError(f"no device cuda:{index}; PyTorch sees {count} CUDA devices here")
    return torch.device("cuda", index)


def _sysconf_bytes(pages: str) -> int | None:
    try:
        amount = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return amount if amount > 0 else None


def _number(path: Path, key: str | None = None) -> int | None:
    """The number in a file, or on its line that begins with `key`; None if there is none, such as for ``max``, which
    is no limit."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return next(int(words[-1] if key is None else words[1]) for words in lines if key in (None, words[0]))
    except (OSError, ValueError, StopIteration):
        return None


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of every control group above this process that limits memory.

    Page cache that the kernel would drop first does not count as in use.
    """
    for folder, second in control_groups("memory"):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if second
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, used = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and used is not None:
            yield limit, used - (_number(folder / "memory.stat", names[2]) or 0)


def control_groups(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of every group above this process that `controller` may limit.

    Both hierarchies are read; a container often sees its own group at the root, so groups that are not there are
    skipped and the root is always read.

    Args:
        controller: such as ``memory`` or ``cpu``.
        root: where the hierarchies are mounted.
        membership: file that says which groups this process is in.
    """
    for controllers, group in _memberships(membership):
        bases = [root / controller, root / controllers] if controller in controllers.split(",") else []
        if not controllers:
            bases = [root, root / "unified"]
        for base in dict.fromkeys(bases):
            own = base / group.strip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(base):
                    yield folder, controllers == ""


def own_group(controller: str, membership: Path = MEMBERSHIP) -> str:
    """The names of the groups that `controller` may limit, in one text; processes of one group have the same."""
    return " ".join(group for names, group in _memberships(membership) if not names or controller in names.split(","))


def _memberships(membership: Path) -> Iterator[tuple[str, str]]:
    """(controllers, group) of this process in each hierarchy; version 2 names no controllers."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, group = line.partition(":")[2].partition(":")
        yield controllers, group
