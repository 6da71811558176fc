"""Seconds of one step, behind one interface. Another model takes the place of this one by having `estimate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from elixir.hardware import HardwareProfile
from elixir.schedule import ScheduleResult
from elixir.search.memory import Placement, Setting
from elixir.search.workload import Workload
from elixir.tracer.step_trace import StepTrace


@dataclass(frozen=True)
class Traffic:
    """What one rank moves and updates in one step."""

    fetched_forward_bytes: int
    """Host to device, beside forward: loads, and the updated weights that live on the device."""
    fetched_backward_bytes: int
    offloaded_bytes: int
    """Device to host: gradients, beside backward. Evictions are clean and move nothing."""
    network_forward_bytes: int
    """Received from other ranks when chunks are gathered."""
    network_backward_bytes: int
    """The same, and what reducing gradients takes."""
    host_adam_numel: int
    device_adam_numel: int

    @property
    def fetched_bytes(self) -> int:
        """Host to device."""
        return self.fetched_forward_bytes + self.fetched_backward_bytes

    @property
    def link_bytes(self) -> int:
        """Over the link between device and host, both directions."""
        return self.fetched_bytes + self.offloaded_bytes

    @property
    def network_bytes(self) -> int:
        """Received over the network."""
        return self.network_forward_bytes + self.network_backward_bytes


def traffic(work: Workload, setting: Setting, placement: Placement, schedule: ScheduleResult) -> Traffic:
    """Bytes and updates of one rank; formulas in `docs/search.md`."""
    world, chunks = setting.world_size, work.chunks
    fetched, network = [0, 0], [0, 0]
    for position, chunk in schedule.timeline:
        phase, size = int(position >= work.first_backward), chunks[chunk].bytes
        network[phase] += size - size // world
        if not placement.weight_on_device[chunk]:
            fetched[phase] += size // world
    offloaded = host_adam = device_adam = 0
    for index, facts in enumerate(chunks):
        if not facts.grad_bytes:
            continue
        network[1] += facts.grad_bytes - facts.grad_bytes // world
        if placement.resident[index]:
            network[0] += facts.bytes - facts.bytes // world
        if placement.state_on_device[index]:
            device_adam += facts.numel // world
            continue
        host_adam += facts.numel // world
        offloaded += facts.grad_bytes // world
        if placement.weight_on_device[index]:
            fetched[0] += facts.bytes // world
    return Traffic(fetched[0], fetched[1], offloaded, network[0], network[1], host_adam, device_adam)


class CostModel(Protocol):
    """Anything that says how long a step takes."""

    def estimate(
        self, work: Workload, placement: Placement, schedule: ScheduleResult, moved: Traffic, *, overlap: bool
    ) -> Mapping[str, float]:
        """Seconds by part; ``total`` is the step."""
        ...


class BandwidthCost:
    """First time model: bytes over bandwidth, FLOPs over the rate that is reached, elements over Adam's rate.

    Three phases. Forward: compute, fetches, gathers, and the host's Adam of the step before, which runs in the order in
    which forward asks for its chunks. Backward (recompute included): compute, fetches, offloads, gathers and
    reductions. Optimizer: the device's Adam. With overlap a phase takes as long as its slowest resource, without as
    long as all of them in turn.

    Not modelled: latencies, a fetch that cannot start early enough, links shared by devices, slower links between
    machines (the profile knows only the links within one).

    Raises:
        InputError: the profile has no FLOP/s for the step's dtype.
    """

    def __init__(self, trace: StepTrace, hardware: HardwareProfile, setting: Setting) -> None:
        self._hardware = hardware
        self._setting = setting
        forward = [event for event in trace.accesses if event.phase == "forward"]
        backward = [event for event in trace.accesses if event.phase != "forward"]
        flops_per_s = _flops_rate(trace, hardware)
        memory = hardware.device_memory_bytes_per_s
        self._compute_s = tuple(
            math.fsum(max(event.flops / flops_per_s, event.moved_bytes / memory) for event in events)
            for events in (forward, backward)
        )
        # All devices of a machine read and write the one host memory.
        shared = hardware.host_memory_bytes_per_s / setting.ranks_per_host
        self._fetch_bytes_per_s = min(hardware.host_to_device_bytes_per_s, shared)
        self._offload_bytes_per_s = min(hardware.device_to_host_bytes_per_s, shared)

    def estimate(
        self, work: Workload, placement: Placement, schedule: ScheduleResult, moved: Traffic, *, overlap: bool
    ) -> dict[str, float]:
        """Seconds by phase (``forward``, ``backward``, ``optimizer``), by resource, and in ``total``."""
        hardware, ranks = self._hardware, self._setting.ranks_per_host
        network = hardware.device_to_device_bytes_per_s
        host_adam = moved.host_adam_numel * ranks / hardware.host_adam_numel_per_s
        device_adam = moved.device_adam_numel / hardware.device_adam_numel_per_s
        offload = moved.offloaded_bytes / self._offload_bytes_per_s
        fetch = [
            amount / self._fetch_bytes_per_s for amount in (moved.fetched_forward_bytes, moved.fetched_backward_bytes)
        ]
        gather = [amount / network for amount in (moved.network_forward_bytes, moved.network_backward_bytes)]
        joined = max if overlap else math.fsum
        forward = joined((self._compute_s[0], fetch[0], gather[0], host_adam))
        backward = joined((self._compute_s[1], fetch[1], offload, gather[1]))
        return {
            "forward": forward,
            "backward": backward,
            "optimizer": device_adam,
            "compute": math.fsum(self._compute_s),
            "host_to_device": math.fsum(fetch),
            "device_to_host": offload,
            "network": math.fsum(gather),
            "host_adam": host_adam,
            "device_adam": device_adam,
            "total": math.fsum((forward, backward, device_adam)),
        }


def _flops_rate(trace: StepTrace, hardware: HardwareProfile) -> float:
    by_dtype: dict[str, int] = {}
    for param in trace.parameters:
        by_dtype[param.dtype] = by_dtype.get(param.dtype, 0) + param.numel
    dtype = max(sorted(by_dtype), key=lambda name: by_dtype[name])
    return hardware.flops_rate(dtype)
