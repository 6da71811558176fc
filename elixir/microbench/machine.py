"""This machine, measured into a `HardwareProfile`."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elixir.errors import InputError
from elixir.free_memory import total_host_bytes
from elixir.hardware import HardwareProfile
from elixir.microbench.adam import adam_rate
from elixir.microbench.compute import matmul_rate
from elixir.microbench.measurement import Measurement, threads_text, today
from elixir.microbench.transfers import device_to_device_rate, device_to_host_rate, host_to_device_rate, memory_rate
from elixir.units import dtype_name

_LOG = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REACHED = "the rates in flops_per_s are measured, so they are reached in full"


def measure(progress: Callable[[str], None] | None = None, quick: bool = False) -> HardwareProfile:
    """Measure this machine: its first CUDA device where there is one, else its CPU as the device.

    Takes under 20 s on two cores (`quick`: under 4 s) and at most 1 GiB of host memory. `flops_per_s` holds reached
    rates, so `matmul_efficiency` is 1. With one device, the rate between devices cannot be measured: it is given as
    the slower direction of the host link, which is what such a copy would have to go through without a direct link.

    Args:
        progress: called with a short text before each measurement.
        quick: smaller buffers and fewer repetitions; good enough to see orders of magnitude.
    """
    tell = progress or (lambda text: None)
    return _measure_cuda(tell, quick) if torch.cuda.is_available() else _measure_cpu(tell, quick)


def _measure_cpu(tell: Callable[[str], None], quick: bool) -> HardwareProfile:
    device = torch.device("cpu")
    tell("host memory bandwidth")
    memory = memory_rate(device, quick=quick)
    tell("host copy bandwidth")
    copy = host_to_device_rate(device, quick=quick)
    tell("Adam on the host")
    adam = adam_rate(device, quick=quick)
    flops, flops_source = _flops(device, tell, quick)
    total = total_host_bytes()
    name = cpu_name()
    return HardwareProfile(
        name=f"measured-{_slug(name)}",
        device_kind="cpu",
        device_name=name,
        compute_capability=None,
        devices_per_host=1,
        device_memory_bytes=total,
        device_memory_bytes_per_s=memory.value,
        flops_per_s=flops,
        matmul_efficiency=1.0,
        host_memory_bytes=total,
        host_memory_bytes_per_s=memory.value,
        host_to_device_bytes_per_s=copy.value,
        device_to_host_bytes_per_s=copy.value,
        device_to_device_bytes_per_s=copy.value,
        host_adam_numel_per_s=adam.value,
        device_adam_numel_per_s=adam.value,
        sources={
            "devices_per_host": "one host is one device here",
            "device_memory_bytes": "read from the operating system: the same memory as the host's",
            "device_memory_bytes_per_s": memory.source,
            "flops_per_s": flops_source,
            "matmul_efficiency": _REACHED,
            "host_memory_bytes": "read from the operating system and its control groups",
            "host_memory_bytes_per_s": memory.source,
            "host_to_device_bytes_per_s": copy.source,
            "device_to_host_bytes_per_s": copy.source,
            "device_to_device_bytes_per_s": copy.source,
            "host_adam_numel_per_s": adam.source,
            "device_adam_numel_per_s": adam.source,
        },
        measured_at=today(),
    )


def _measure_cuda(tell: Callable[[str], None], quick: bool) -> HardwareProfile:
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    steps: tuple[tuple[str, str, Callable[[], Measurement]], ...] = (
        ("device_memory_bytes_per_s", "device memory bandwidth", lambda: memory_rate(device, quick=quick)),
        ("host_memory_bytes_per_s", "host memory bandwidth", lambda: memory_rate("cpu", quick=quick)),
        ("host_to_device_bytes_per_s", "host to device", lambda: host_to_device_rate(device, quick=quick)),
        ("device_to_host_bytes_per_s", "device to host", lambda: device_to_host_rate(device, quick=quick)),
        ("host_adam_numel_per_s", "Adam on the host", lambda: adam_rate("cpu", quick=quick)),
        ("device_adam_numel_per_s", "Adam on the device", lambda: adam_rate(device, quick=quick)),
    )
    rates: dict[str, Measurement] = {}
    for field, text, run in steps:
        tell(text)
        rates[field] = run()
        torch.cuda.empty_cache()  # what one measurement used is free for the next
    flops, flops_source = _flops(device, tell, quick)
    peer, peer_source = _peer_rate(rates, tell, quick)
    values: dict[str, Any] = {field: rate.value for field, rate in rates.items()}
    return HardwareProfile(
        name=f"measured-{_slug(properties.name)}",
        device_kind="cuda",
        device_name=properties.name,
        compute_capability=(properties.major, properties.minor),
        devices_per_host=torch.cuda.device_count(),
        device_memory_bytes=torch.cuda.mem_get_info(device)[1],
        flops_per_s=flops,
        matmul_efficiency=1.0,
        host_memory_bytes=total_host_bytes(),
        device_to_device_bytes_per_s=peer,
        sources={field: rate.source for field, rate in rates.items()}
        | {
            "compute_capability": "read from the driver",
            "devices_per_host": "read from the driver: visible devices",
            "device_memory_bytes": "read from the driver: total, not free",
            "flops_per_s": flops_source,
            "matmul_efficiency": _REACHED,
            "host_memory_bytes": "read from the operating system and its control groups",
            "device_to_device_bytes_per_s": peer_source,
        },
        measured_at=today(),
        **values,
    )


def _peer_rate(rates: dict[str, Measurement], tell: Callable[[str], None], quick: bool) -> tuple[float, str]:
    if torch.cuda.device_count() > 1:
        tell("device to device")
        rate = device_to_device_rate("cuda:0", "cuda:1", quick=quick)
        return rate.value, rate.source
    slower = min(
        (rates["host_to_device_bytes_per_s"], rates["device_to_host_bytes_per_s"]), key=lambda rate: rate.value
    )
    return slower.value, f"not measured, one device only; taken as the host link ({slower.source})"


def _flops(device: torch.device, tell: Callable[[str], None], quick: bool) -> tuple[dict[str, float], str]:
    """Reached FLOP/s by dtype name, and the text of their source. A dtype the device cannot do is left out."""
    rates: list[tuple[str, Measurement]] = []
    for dtype in _DTYPES:
        tell(f"matrix product, {dtype_name(dtype)}")
        try:
            rates.append((dtype_name(dtype), matmul_rate(dtype, device, quick=quick)))
        except InputError as error:
            _LOG.warning("no rate for %s: %s", dtype_name(dtype), error)
    return {name: rate.value for name, rate in rates}, "; ".join(rate.source for _, rate in rates)


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """Model and number of usable cores, such as ``AMD EPYC, 2 cores, 2 threads``; never empty."""
    model = ""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
        model = match[1].strip() if match else ""
    except OSError:
        pass  # not Linux: platform knows, if less well
    model = model or platform.processor() or platform.machine() or "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{model}, {cores} cores, {threads_text()}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.split(",")[0].lower()).strip("-")
