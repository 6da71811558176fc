"""Bandwidth of memories and of the links between them."""

from __future__ import annotations

import torch

from elixir.errors import InputError
from elixir.microbench.measurement import Measurement, check_device, effort, median_seconds, threads_text
from elixir.units import MIB


def memory_rate(device: torch.device | str = "cpu", *, quick: bool = False) -> Measurement:
    """Bandwidth of the device's own memory (or of host memory, all threads): ``c = a + b`` over fp32 buffers.

    Bytes read and written are counted; a line that the cache fetches before it is overwritten is not, so hardware may
    move up to a third more.
    """
    target = check_device(device)
    plan = effort(target, quick)
    numel = plan.buffer_bytes // 4
    a, b, c = (torch.ones(numel, device=target) for _ in range(3))
    seconds, repeats = median_seconds(lambda: torch.add(a, b, out=c), target, plan)
    how = f"c = a + b on {target}, fp32 buffers of {numel * 4 // MIB} MiB"
    if target.type == "cpu":
        how += f", {threads_text()}"
    return Measurement(f"memory {target}", 3 * 4 * numel / seconds, "bytes/s", repeats, how)


def host_to_device_rate(device: torch.device | str = "cpu", *, quick: bool = False) -> Measurement:
    """Bytes per second of one large copy from the host to `device`: pinned for CUDA, host to host for ``cpu``."""
    return _host_link_rate(check_device(device), to_device=True, quick=quick)


def device_to_host_rate(device: torch.device | str = "cpu", *, quick: bool = False) -> Measurement:
    """Bytes per second of one large copy from `device` to the host; see `host_to_device_rate`."""
    return _host_link_rate(check_device(device), to_device=False, quick=quick)


def device_to_device_rate(
    source: torch.device | str, destination: torch.device | str, *, quick: bool = False
) -> Measurement:
    """Bytes per second of one large copy between two CUDA devices, one direction.

    Raises:
        InputError: the devices are not two different CUDA devices of this machine.
    """
    first, second = check_device(source), check_device(destination)
    if first.type != "cuda" or second.type != "cuda" or first == second:
        raise InputError(f"expected two different CUDA devices, got {first} and {second}")
    plan = effort(second, quick)
    numel = plan.buffer_bytes
    origin = torch.ones(numel, dtype=torch.uint8, device=first)
    target = torch.empty(numel, dtype=torch.uint8, device=second)

    def copy() -> None:
        # The copy spans two devices: an event of one says nothing about the other, so both are waited for.
        target.copy_(origin, non_blocking=True)
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)

    seconds, repeats = median_seconds(copy, torch.device("cpu"), plan)  # by the clock, see above
    how = f"copy {first} to {second}, {numel // MIB} MiB"
    return Measurement(f"{first} to {second}", numel / seconds, "bytes/s", repeats, how)


def _host_link_rate(device: torch.device, *, to_device: bool, quick: bool) -> Measurement:
    plan = effort(device, quick)
    numel = plan.buffer_bytes
    pinned = device.type == "cuda"
    host = torch.empty(numel, dtype=torch.uint8, pin_memory=pinned).fill_(1)
    other = torch.ones(numel, dtype=torch.uint8, device=device)
    source, target = (host, other) if to_device else (other, host)
    seconds, repeats = median_seconds(lambda: target.copy_(source, non_blocking=pinned), device, plan)
    route = f"host to {device}" if to_device else f"{device} to host"
    kind = "pinned" if pinned else f"host memory, {threads_text()}"
    return Measurement(
        route, numel / seconds, "bytes/s", repeats, f"copy {route}, {numel // MIB} MiB contiguous, {kind}"
    )
